"""Capabilities of a cache: a module for each, with all that tests it."""

from __future__ import annotations

import importlib
from typing import Any


class _Module:
    """A module that is imported when it is first used: an adapter class needs none of these."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(importlib.import_module(self._name), name)
        return found


torch = _Module("torch")
numpy = _Module("numpy")
strategies = _Module("hypothesis.strategies")
