"""The base class of adapters, which records required, optional and defined methods."""

from __future__ import annotations

from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.capability import capabilities_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Adapter:
    """The base class of adapters for caches and for engines.

    A direct subclass is a kind of adapter. An adapter of the kind must define its methods, and
    those of the capabilities among its bases, except for the ones marked ``optional``.
    """

    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    abilities: ClassVar[frozenset[str]] = frozenset()
    """Optional methods that this adapter defines."""
    paths: ClassVar[Mapping[str, Any]] = {}
    conditions: ClassVar[Sequence[str]] = ()
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    replays: ClassVar[int] = 1
    fast_interpreter: ClassVar[bool] = False
    """True to use shortcuts in Triton's interpreter while shipped tests run.

    Interpreted kernels take half the time: types, shapes and replaced functions are looked up once,
    and checks for integer overflow, whose results Triton drops, are left out. This replaces a dozen
    of Triton's own functions. If a version of Triton lacks one of these names, nothing is replaced;
    code that depends on internals of the interpreter should leave it off.
    """
    capabilities: ClassVar[tuple[Any, ...]] = ()
    """Capabilities among its bases, in their order."""
    declared: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Methods that the kind and its capabilities declare."""
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
        """Return the classes that declare adapter methods: its kind, and capabilities' mixins."""
        kinds = [each for each in cls.__mro__ if Adapter in each.__bases__]
        return [*kinds, *(each.methods for each in cls.capabilities)]

    @classmethod
    def describe(cls, example: Any) -> str:
        """Describe a history or a mix of requests, for failure messages."""
        return str(example.describe())

    @classmethod
    def defines(cls, name: str) -> bool:
        """Return True for a method that the adapter defines itself."""
        return getattr(cls, name) is not cls.declared[name]
