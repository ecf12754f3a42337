"""What a cache may offer: a module for each capability, with all that tests it."""

from __future__ import annotations

import importlib
from typing import Any


class _Torch:
    """Torch, imported when it is first used: an adapter class and ``pytest --help`` need none."""

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(importlib.import_module("torch"), name)
        return found


torch = _Torch()
