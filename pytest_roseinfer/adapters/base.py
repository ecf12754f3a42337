"""The base of adapters, which knows the methods that an adapter must define, and does define."""

from __future__ import annotations

from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.capability import capabilities_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Adapter:
    """The base of adapters for caches and for engines.

    A class right under this one is a kind of adapter. Its methods, and those of the capabilities
    among its bases, are what an adapter of the kind must define, except for those marked
    ``optional``.
    """

    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    abilities: ClassVar[frozenset[str]] = frozenset()
    """The optional methods that this adapter defines."""
    paths: ClassVar[Mapping[str, Any]] = {}
    conditions: ClassVar[Sequence[str]] = ()
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    replays: ClassVar[int] = 1
    fast_interpreter: ClassVar[bool] = False
    """Shortcuts in Triton's interpreter while shipped tests run.

    Interpreted kernels take half the time: types, shapes and replaced functions are looked up once,
    and an overflow of integers is not looked for that is not reported. This replaces a dozen of
    Triton's own functions. Where a Triton lacks one of these names, nothing is replaced; code that
    depends on how the interpreter works inside should leave it off.
    """
    capabilities: ClassVar[tuple[Any, ...]] = ()
    """The capabilities among its bases, in their order."""
    declared: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """The methods that the kind and its capabilities name."""
    _renamed: ClassVar[Mapping[str, str]] = {}
    """Replacements for former attributes and methods of the kind, by their old names."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.capabilities = tuple(capabilities_of(cls))
        cls.declared = {
            name: each
            for declaring in cls.declaring()
            for name, each in vars(declaring).items()
            if isfunction(each) and not name.startswith("_")
        }
        cls.optional = tuple(
            name for name, each in cls.declared.items() if hasattr(each, "optional")
        )
        cls.required = tuple(name for name in cls.declared if name not in cls.optional)
        cls.abilities = frozenset(filter(cls.defines, cls.optional))

    @classmethod
    def declaring(cls) -> list[type]:
        """Return the classes that say what an adapter may define: its kind, and capabilities."""
        kinds = [each for each in cls.__mro__ if Adapter in each.__bases__]
        return [*kinds, *(each.methods for each in cls.capabilities)]

    @classmethod
    def describe(cls, example: Any) -> str:
        """Return a history or a mix of requests as a failure tells it."""
        return str(example.words())

    @classmethod
    def defines(cls, name: str) -> bool:
        """Return True for a method of the adapter's own, which replaces the one that names it."""
        return getattr(cls, name) is not cls.declared[name]
