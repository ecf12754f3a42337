"""Planted bug: an edit of one module, or a broken cache of the tests."""

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
RESET_PREFIXES = "tests.mutants.prefix_cached_manager:ResetPrefixes"
ENGINE = _TARGETS + "roseinfer_engine:RoseinferEngine"
MANAGERS = (GROUPED, PER_LAYER)


class StaleMutant(Exception):
    """The statements that a mutant replaces do not exist any more."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replacement of a module's statements that match ``find`` (``syntax.replaced``).

    Without a module nothing is replaced: the only target is a broken cache.
    """

    name: str
    wrong: str
    """Description of the bug in one sentence."""
    module: str = ""
    function: str = ""
    """Qualified name of the function or class with the statements."""
    find: str = ""
    replace: str = ""
    rows: tuple[str, ...] = ()
    """Rows of known bugs of real caches (docs/lab/mutants.md) that it stands for."""
    targets: tuple[str, ...] = MANAGERS
    """Adapters that can reveal the bug, searched in this order."""
    directed: str = ""
    """Name of the directed check for it; empty if histories can reveal it."""

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
