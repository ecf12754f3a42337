"""Takes out of a request what an engine does not offer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.adapters.mix import Asked

_LIKELIEST: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "seed": 0,
}


def as_offered(adapter: type[EngineAdapter], asked: Asked) -> Asked:
    """Return the request as this engine can be asked for it."""
    if not adapter.defines("cancel"):
        asked = replace(asked, cancelled_after=None)
    if not adapter.takes_sampling:
        asked = replace(asked, sampling=replace(asked.sampling, **_LIKELIEST), ends_early=False)
    return asked
