"""What pytest sees: hooks, options, markers and fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.plugin import fixtures, hooks

if TYPE_CHECKING:
    import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugin's modules.

    For each name in a ``pytest_plugins``, pytest reads what all installed distributions offer.
    """
    for module in (hooks, fixtures):
        pluginmanager.register(module, module.__name__)
