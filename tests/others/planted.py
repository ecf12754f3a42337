"""Bugs that are planted into a project's own classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.targets.partial_import import import_part

if TYPE_CHECKING:
    import pytest


def plant(monkeypatch: pytest.MonkeyPatch, package: str, where: str, name: str, bug: Any) -> None:
    """Put in place of a class's method, ``module:class``, what ``bug`` makes of the right one."""
    module, _, kind = where.partition(":")
    owner = getattr(import_part(package, module, ""), kind)
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))
