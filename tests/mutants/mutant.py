"""A planted bug: one edit of one module of the cache, or a cache of its own that is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TARGETS = "pytest_roseinfer.targets."
PER_LAYER = _TARGETS + "roseinfer_kv:PerLayerManager"
GROUPED = _TARGETS + "roseinfer_kv:GroupedManager"
WINDOWED = _TARGETS + "roseinfer_kv:WindowedManager"
KERNELS = "tests.mutants.kernel_caches:StridedKernels"
COMPACTED = "tests.mutants.kernel_caches:CompactedKernels"
PREFIXED = "tests.mutants.prefix_cached_manager:PrefixCachedManager"
HASHED = "tests.mutants.prefix_cached_manager:HashedPrefixes"
WINDOWED_PREFIXES = "tests.mutants.prefix_cached_manager:WindowedPrefixes"
ENGINE = _TARGETS + "roseinfer_engine:RoseinferEngine"
MANAGERS = (GROUPED, PER_LAYER)


class StaleMutant(Exception):
    """The code a mutant was made for is no longer there, so it plants nothing."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace the only occurrence of ``find`` in ``module`` by ``replace``.

    Without a module nothing is replaced: its only target is itself broken.
    """

    name: str
    wrong: str
    """What is wrong then, in one sentence."""
    module: str = ""
    find: str = ""
    replace: str = ""
    rows: tuple[str, ...] = ()
    """Rows of the lists of bugs that real caches had (docs/mutants.md) that it stands for."""
    targets: tuple[str, ...] = MANAGERS
    """The adapters that can show it, searched in this order."""
    directed: str = ""
    """The directed check that shows it, when no history can."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Mutant:
        lists = {name: tuple(data[name]) for name in ("rows", "targets")}
        return cls(**{**data, **lists})

    def applied_to(self, source: str) -> str:
        """The module's source with the bug in it."""
        times = source.count(self.find)
        if times != 1:
            raise StaleMutant(
                f"mutant {self.name!r} replaces text that must occur once in {self.module} and "
                f"occurs {times} times:\n{self.find}"
            )
        return source.replace(self.find, self.replace)
