"""Draws what requests ask for beyond ``Sampling``, of an adapter that says it is offered."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pytest_roseinfer.adapters.mix import WiderSampling

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.adapters.mix import Asked

HOTTEST = 30.0
"""The temperature at which unlikely tokens are drawn too, since nothing leaves them out."""
_PENALTIES: tuple[dict[str, float], ...] = (
    *({},) * 6,
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"presence_penalty": -1.0, "frequency_penalty": 2.0},
)
_SPANS = st.tuples(st.integers(0, 12), st.integers(1, 4))


def wishing(draw: st.DrawFn, adapter: type[EngineAdapter], asked: Asked) -> Asked:
    """Add a min_p, penalties, log-probabilities and stop strings to some requests."""
    if adapter.defines("pieces") and draw(st.sampled_from((False, False, False, True))):
        asked = replace(asked, stops=tuple(draw(st.lists(_SPANS, min_size=1, max_size=2))))
    wishes: dict[str, object] = {}
    if adapter.takes_min_p and 0 < asked.sampling.temperature < HOTTEST:
        wishes["min_p"] = draw(st.sampled_from((0.0, 0.05, 0.4)))
    if adapter.defines("logprobs"):
        wishes["logprobs"] = draw(st.sampled_from((False, False, False, True)))
    if wishes.get("logprobs") and adapter.defines("top_logprobs"):
        wishes["top_logprobs"] = draw(st.sampled_from((0, 1, 4, 20)))
    if adapter.defines("prompt_logprobs"):
        wishes["prompt_logprobs"] = draw(st.sampled_from((False,) * 7 + (True,)))
    if adapter.takes_counted_penalties:
        wishes |= draw(st.sampled_from(_PENALTIES))
    if any(wishes.values()):
        sampling = WiderSampling(**{**asdict(asked.sampling), **wishes})
        asked = replace(asked, sampling=sampling)
    return asked
