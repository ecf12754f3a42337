"""What is checked of a request's tokens, log-probabilities and text beside its equality with alone.

Each function returns what is wrong, in words, or an empty text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pytest_roseinfer.engines.answers import floats
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
    if abs(found - right) <= _room(adapter, logits):
        return ""
    return f"log-probability {found:.6g}; by the model it is {right:.6g}"


def wrong_top(
    adapter: EngineAdapter,
    mix: RequestMix,
    before: Sequence[int],
    top: Sequence[tuple[int, float]],
    most: int,
) -> str:
    """Look whether these are the ``most`` likeliest tokens after ``before``, and as likely."""
    logits = _logits(adapter, mix, before)
    right = log_probabilities(logits)
    ids = [token for token, _ in top]
    many = min(most, len(right))
    tokens = {*ids} & {*range(len(right))}
    if len(tokens) != len(ids) or len(ids) != many:
        return f"{many} likeliest tokens were asked for, and told are {ids}"
    room = _room(adapter, logits)
    for (token, value), least in zip(top, np.sort(right)[::-1], strict=False):
        if abs(value - right[token]) > room:
            return f"{token} is told with {value:.6g}; by the model it is {right[token]:.6g}"
        if abs(right[token] - least) > room:
            return f"{ids} are told as the likeliest; at the place of {token} is another"
    return ""


def wrong_prompt(
    adapter: EngineAdapter,
    mix: RequestMix,
    prompt: Sequence[int],
    found: Sequence[float | None],
) -> str:
    """Look whether what is told of a prompt's tokens is so by the model's own logits."""
    if len(found) != len(prompt) or found[0] is not None:
        return f"its prompt has {len(prompt)} tokens, of which the first is not told: {[*found]}"
    for at in range(1, len(prompt)):
        value = found[at]
        if value is None:
            return f"nothing is told of token {at} of its prompt"
        if wrong := wrong_logprob(adapter, mix, prompt[:at], prompt[at], value):
            return f"token {at} of its prompt: {wrong}"
    return ""


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


def _room(adapter: EngineAdapter, logits: Floats) -> float:
    """Return how far off log-probabilities may be that come of such logits."""
    return 2 * adapter.rounding * float(np.abs(logits).max()) + _SUM_ERROR


def _logits(adapter: EngineAdapter, mix: RequestMix, before: Sequence[int]) -> Floats:
    return floats(adapter.logits(before, mix))
