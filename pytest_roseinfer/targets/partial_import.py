"""Import of parts of a package whose ``__init__`` has more dependencies than those parts."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator


def import_part(package: str, part: str, install: str) -> Any:
    """Import ``package.part`` without running ``package/__init__.py``.

    ``install`` is the advice in the error if the package is missing.
    """
    if package not in sys.modules:
        spec = find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"{package} is not installed: {install}", name=package)
        sys.modules[package] = module_from_spec(spec)
    return import_module(f"{package}.{part}")


@contextmanager
def stub_package(package: str, *parts: str) -> Iterator[None]:
    """Replace a missing package by mocks during imports that do not call it.

    ``parts`` are its modules that are imported by name.
    """
    missing = () if package in sys.modules or find_spec(package) else (package, *parts)
    sys.modules.update({name: mock.MagicMock(name=name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
