"""The contract of a capability: what a cache may offer, and what tests it.

A capability is a module with a mixin of adapter methods and one ``Capability`` that names them.
What an adapter offers follows from its own bases: those of ``KVCacheAdapter`` are the shipped
capabilities, and another one is mixed in, as in ``class Toy(PinningMethods, KVCacheAdapter)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Invariant
    from pytest_roseinfer.capabilities.operation import Operation

_Method = TypeVar("_Method", bound=Callable[..., Any])


def optional(method: _Method) -> _Method:
    """Mark a method that is tested where an adapter defines it."""
    method.__dict__["optional"] = True
    return method


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """What a cache may offer beyond ``make``, ``append`` and ``peek``."""

    methods: type
    """A mixin with the adapter methods, and with the attributes by which an adapter describes them.

    It has no ``__init__`` and calls no ``super()``. Methods that are marked ``optional`` are tested
    where an adapter defines them."""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For optional methods, the others without which no step would call them."""
    operations: Sequence[type[Operation]] = ()
    """Steps that histories may have; each is drawn where the adapter offers what it needs."""
    invariants: Sequence[Invariant] = ()
    """What must hold after each step."""
    refuse: Sequence[Callable[[type[Any]], None]] = ()
    """Checks of an adapter class, each of which raises ``TypeError`` where it makes no sense."""

    def __post_init__(self) -> None:
        _OF_METHODS[self.methods] = self


_OF_METHODS: dict[type, Capability] = {}


def capabilities_of(adapter: type[Any]) -> list[Capability]:
    """Return the capabilities that are among the bases of an adapter class, in their order."""
    return [_OF_METHODS[each] for each in adapter.__mro__ if each in _OF_METHODS]
