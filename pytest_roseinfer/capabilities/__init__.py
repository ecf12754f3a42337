"""What a cache may offer: a module for each capability, with all that tests it."""

from __future__ import annotations

import importlib
import pkgutil


def import_all() -> None:
    """Import every module, so that each registers its operations and invariants."""
    for found in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(found.name)
