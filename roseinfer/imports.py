"""Imports of torch and transformers, which take most of the start of a process."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from roseinfer.garbage import gc_disabled

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_NEEDED = ("scipy", "sklearn")
"""Libraries that transformers imports where they are installed: for losses and assisted generation,
which no command uses. Their imports take seconds."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collections, a tenth of the time, and without libraries not needed.

    Only for processes that roseinfer starts: transformers treats these libraries as not installed
    from then on, and a user's own code may need them.
    """
    hidden = [name for name in _NOT_NEEDED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        with gc_disabled():
            yield
    finally:
        for name in hidden:
            del sys.modules[name]
