"""What is checked of a request's tokens, log-probabilities and text beside its equality with alone.

Each function returns what is wrong, in words, or an empty text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pytest_roseinfer.engines.sampling import log_probabilities, may_be_chosen
from pytest_roseinfer.engines.text import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.adapters.mix import RequestMix, Sampling
    from pytest_roseinfer.engines.sampling import Floats

_SUM_ERROR = 1e-5
"""Log-probabilities in 32 bits are wrong by less."""


def wrong_choice(
    adapter: EngineAdapter,
    mix: RequestMix,
    prompt: Sequence[int],
    new: Sequence[int],
    sampling: Sampling,
) -> str:
    """Look whether the last token of ``new`` may come after the others and the prompt."""
    *before, token = *prompt, *new
    logits = _logits(adapter, mix, before)
    allowed = may_be_chosen(logits, sampling, before, len(prompt), adapter.rounding)
    if 0 <= token < len(allowed) and allowed[token]:
        return ""
    return f"{token}, which its parameters rule out: they allow {np.flatnonzero(allowed).tolist()}"


def wrong_logprob(
    adapter: EngineAdapter, mix: RequestMix, before: Sequence[int], token: int, found: float
) -> str:
    """Look whether a token's log-probability is that by the model's own logits."""
    logits = _logits(adapter, mix, before)
    right = float(log_probabilities(logits)[token])
    if abs(found - right) <= 2 * adapter.rounding * np.abs(logits).max() + _SUM_ERROR:
        return ""
    return f"log-probability {found:.6g}; by the model it is {right:.6g}"


def wrong_text(
    before: Sequence[str], pieces: Sequence[str], text: str, stops: Sequence[str], *, whole: bool
) -> str:
    """Look whether the pieces, joined, are the text up to a stop string, or so far a part of it."""
    if list(pieces[: len(before)]) != list(before):
        return f"showed the pieces {list(before)} and has {list(pieces)} now"
    found, right = "".join(pieces), shown(text, stops)
    if found == right or (not whole and right.startswith(found)):
        return ""
    return f"shows {found!r}; its tokens say {right!r}"


def _logits(adapter: EngineAdapter, mix: RequestMix, before: Sequence[int]) -> Floats:
    return np.asarray(adapter.logits(before, mix), dtype=np.float64)
