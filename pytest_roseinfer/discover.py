"""Importing every file of a folder, so that each registers what it holds."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def import_all(folder: ModuleType) -> None:
    """Import the files, and those of the folders in it, in the order of their names."""
    for found in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        importlib.import_module(found.name)
