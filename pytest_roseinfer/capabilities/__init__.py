"""Capabilities of a cache: one module each, with the tests of that capability."""

from __future__ import annotations

import importlib
from typing import Any


class _Module:
    """A module imported at its first use, so that importing an adapter class stays cheap."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(importlib.import_module(self._name), name)
        return value


torch = _Module("torch")
numpy = _Module("numpy")
strategies = _Module("hypothesis.strategies")
