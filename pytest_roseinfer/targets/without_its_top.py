"""Imports parts of a package whose own ``__init__`` needs more than those parts do."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

if TYPE_CHECKING:
    from collections.abc import Sequence


def part_of(package: str, part: str, install: str, not_called: Sequence[str] = ()) -> Any:
    """Import ``package.part``, but nothing of what ``package/__init__.py`` does.

    ``install`` says how to get the package where it is missing. Packages that it imports and that
    are ``not_called`` need not be there.
    """
    if package not in sys.modules:
        spec = find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"{package} is not there: {install}", name=package)
        sys.modules[package] = module_from_spec(spec)
    absent = [name for name in not_called if name not in sys.modules and find_spec(name) is None]
    sys.modules.update({name: MagicMock() for name in absent})
    try:
        return import_module(f"{package}.{part}")
    finally:
        for name in absent:
            del sys.modules[name]
