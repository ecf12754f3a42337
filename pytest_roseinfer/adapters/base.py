"""The base of adapters, which knows the methods that an adapter must define, and does define."""

from __future__ import annotations

from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Method = TypeVar("_Method", bound="Callable[..., Any]")


def optional(method: _Method) -> _Method:
    """Mark a method of a kind of adapter that is tested where an adapter defines it."""
    method.__dict__["optional"] = True
    return method


class Adapter:
    """What adapters for caches and for engines have in common.

    A class right under this one is a kind of adapter. Its methods are what an adapter of the kind
    must define, except for those marked ``optional``.
    """

    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    abilities: ClassVar[frozenset[str]] = frozenset()
    """The optional methods that this adapter defines."""
    paths: ClassVar[Mapping[str, Any]] = {}
    conditions: ClassVar[Sequence[str]] = ()
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    replays: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Adapter in cls.__bases__:
            methods = {name: each for name, each in vars(cls).items() if isfunction(each)}
            cls.optional = tuple(
                name for name, each in methods.items() if hasattr(each, "optional")
            )
            cls.required = tuple(name for name in methods if name not in cls.optional)
        cls.abilities = frozenset(filter(cls.defines, cls.optional))

    @classmethod
    def in_words(cls, example: Any) -> str:
        """Return a history or a mix of requests as a failure tells it."""
        return str(example.words())

    @classmethod
    def defines(cls, name: str) -> bool:
        """Return True for a method of the adapter's own, which replaces that of its kind."""
        kind = cls.__mro__[cls.__mro__.index(Adapter) - 1]
        return getattr(cls, name) is not getattr(kind, name)
