"""What an adapter class defines, of the methods its kind of adapter can have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Adapter:
    """What adapters for caches and for engines have in common."""

    required: ClassVar[tuple[str, ...]] = ()
    """Methods that every adapter of the kind must define."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Methods that are tested where they are defined."""
    paths: ClassVar[Mapping[str, Any]] = {}
    conditions: ClassVar[Sequence[str]] = ()

    @classmethod
    def defines(cls, name: str) -> bool:
        """Whether a method is the adapter's own, and not the one that says it is missing."""
        kind = cls.__mro__[cls.__mro__.index(Adapter) - 1]
        return getattr(cls, name) is not getattr(kind, name)

    @classmethod
    def paths_on(cls, device: str) -> dict[str, Any]:
        """Its fast paths that can run on a device."""
        kind = device.partition(":")[0]
        return {name: path for name, path in cls.paths.items() if path.device in (None, kind)}

    @classmethod
    def missing(cls) -> list[str]:
        return [name for name in cls.required if not cls.defines(name)]

    @classmethod
    def offered(cls) -> list[str]:
        return [name for name in cls.optional if cls.defines(name)]
