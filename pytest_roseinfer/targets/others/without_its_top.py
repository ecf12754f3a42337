"""Imports parts of a package whose own ``__init__`` needs more than those parts do."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any


def part_of(package: str, part: str, install: str) -> Any:
    """Import ``package.part``, but nothing of what ``package/__init__.py`` does.

    ``install`` says how to get the package where it is missing.
    """
    if package not in sys.modules:
        spec = find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"{package} is not there: {install}", name=package)
        sys.modules[package] = module_from_spec(spec)
    return import_module(f"{package}.{part}")
