"""The plugin that pytest loads: hooks, options, markers and fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.plugin import fixtures, hooks

if TYPE_CHECKING:
    import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugin's modules.

    Not by ``pytest_plugins``: for each name in it, pytest reads the entry points of all installed
    distributions.
    """
    for module in (hooks, fixtures):
        pluginmanager.register(module, module.__name__)
