"""What an adapter class defines, of the methods its kind of adapter can have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Method = TypeVar("_Method", bound="Callable[..., Any]")


def required(method: _Method) -> _Method:
    """Every adapter of the kind must define this method."""
    method.__dict__["offered"] = "required"
    return method


def optional(method: _Method) -> _Method:
    """This method is tested where an adapter defines it."""
    method.__dict__["offered"] = "optional"
    return method


class Adapter:
    """What adapters for caches and for engines have in common."""

    required: ClassVar[tuple[str, ...]] = ()
    """Methods that every adapter of the kind must define."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Methods that are tested where they are defined."""
    abilities: ClassVar[frozenset[str]] = frozenset()
    """The optional methods that this adapter defines."""
    paths: ClassVar[Mapping[str, Any]] = {}
    conditions: ClassVar[Sequence[str]] = ()
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Adapter in cls.__bases__:  # a kind of adapter
            cls.required, cls.optional = cls._marked("required"), cls._marked("optional")
        cls.abilities = frozenset(filter(cls.defines, cls.optional))

    @classmethod
    def _marked(cls, mark: str) -> tuple[str, ...]:
        own = vars(cls).items()
        return tuple(name for name, each in own if getattr(each, "offered", "") == mark)

    @classmethod
    def defines(cls, name: str) -> bool:
        """Whether a method is the adapter's own, and not the one that says it is missing."""
        kind = cls.__mro__[cls.__mro__.index(Adapter) - 1]
        return getattr(cls, name) is not getattr(kind, name)

    @classmethod
    def missing(cls) -> list[str]:
        return [name for name in cls.required if not cls.defines(name)]
