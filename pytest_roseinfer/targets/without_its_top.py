"""Imports parts of a package whose own ``__init__`` needs more than those parts do."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator


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


@contextmanager
def without(package: str, *parts: str) -> Iterator[None]:
    """Do, while importing, without a package that is missing and whose names are only taken.

    ``parts`` are those of its modules that are imported by name.
    """
    missing = () if package in sys.modules or find_spec(package) else (package, *parts)
    sys.modules.update({name: mock.MagicMock(name=name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
