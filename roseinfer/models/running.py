"""The attention that the present forward pass runs with.

It is no argument, since many models do not hand on to their layers what they do not know.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roseinfer.attention.backend import Attention

RUNNING: ContextVar[Attention | None] = ContextVar("running_attention", default=None)
"""None outside the engine."""
