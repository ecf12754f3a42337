"""Which Python code is under test, and which belongs to libraries and tools."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOOLS = frozenset({"pytest_roseinfer", "triton"})
"""Ours counts; what goes into Triton is counted as launches, and differs under its interpreter."""


class OwnCode:
    """Tells by a module's name: of ``packages`` if any are named, else of what is not installed."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        self.packages = frozenset(packages)
        self._known: dict[str, bool] = {}
        paths = sysconfig.get_paths()
        self._installed = tuple(
            Path(paths[kind]) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
        )

    def is_own(self, module: str) -> bool:
        root = module.partition(".")[0]
        known = self._known.get(root)
        if known is None:
            known = self._known[root] = self._find_out(root)
        return known

    def is_tool(self, module: str) -> bool:
        return module.partition(".")[0] in _TOOLS

    def _find_out(self, root: str) -> bool:
        if self.packages:
            return root in self.packages
        if root in _TOOLS or root in sys.builtin_module_names:
            return False
        module = sys.modules.get(root)
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        found = [Path(place) for place in places if place]
        return bool(found) and not any(
            place.is_relative_to(installed) for place in found for installed in self._installed
        )
