"""A planted bug: one edit of one module of the cache, or a cache of its own that is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.mutants.syntax import NoMatch, replaced

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
    """Replace the statements of a module that match ``find`` (``syntax.replaced``) by ``replace``.

    Without a module nothing is replaced: its only target is itself broken.
    """

    name: str
    wrong: str
    """What is wrong then, in one sentence."""
    module: str = ""
    function: str = ""
    """Qualified name of the function or class that has the statements."""
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
        """Return the module's source with the bug in it."""
        try:
            return replaced(source, self.function, self.find, self.replace)
        except NoMatch as error:
            raise StaleMutant(
                f"mutant {self.name!r} replaces statements of {self.function or self.module}: "
                f"{error}\n{self.find}"
            ) from None
