"""Bugs planted into classes of other projects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.targets.partial_import import import_part

if TYPE_CHECKING:
    import pytest


def plant(monkeypatch: pytest.MonkeyPatch, package: str, where: str, name: str, bug: Any) -> None:
    """Replace a method of a class, ``module:class``, by the result of ``bug`` for that method."""
    module, _, kind = where.partition(":")
    owner = getattr(import_part(package, module, ""), kind)
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))
