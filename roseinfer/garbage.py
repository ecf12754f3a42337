"""Garbage collection by Python: when it must wait, and what it need not look at."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_gc() -> None:
    """Exclude all current objects from garbage collection.

    Libraries leave hundreds of thousands of objects, and the objects allocated for tokens cause
    frequent collections: traversing all objects each time takes longer than the work per token.
    """
    gc.collect()
    gc.freeze()
