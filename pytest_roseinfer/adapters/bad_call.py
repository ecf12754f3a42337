"""A call that a cache must refuse, as an adapter says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class BadCall:
    """One call, and what must come of it."""

    words: str
    """What is done, as in "free_blocks with a block of another layer"."""
    call: Callable[[], object]
    errors: tuple[type[BaseException], ...] = ()
    """What it must raise. Empty for a call that is fine and undoes itself."""
