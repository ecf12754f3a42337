"""The slow twins of engines: logprobs and sampling from logits in numpy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_roseinfer.engines.answers import floats, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter, RequestMix, Sampling

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]


# What an engine may choose, computed in numpy from a model's logits and nothing else.
#
# The order is that of transformers: repetition penalty, temperature, top_k, top_p, min_p. OpenAI's
# two penalties come behind the first, as vLLM has them.


_SUM_ERROR = 1e-6
"""Probabilities that are added up in 32 bits come out wrong by about as much."""


def log_probabilities(logits: Floats) -> Floats:
    """Return the logarithm of each token's probability by the model alone."""
    below = logits - logits.max()
    shifted: Floats = below - np.log(np.exp(below).sum())
    return shifted


def distribution(
    logits: Floats, sampling: Sampling, tokens: Sequence[int], prompted: int
) -> Floats:
    """Return the logarithm of what each token is drawn with; -infinity for one that never is."""
    scaled = _scaled(logits, sampling, tokens, prompted)
    kept = _kept(scaled, sampling, room=0.0)
    if sampling.temperature == 0:
        kept = np.arange(len(scaled)) == scaled.argmax()  # the first of several
    return log_probabilities(np.where(kept, scaled, -np.inf))


def may_be_chosen(
    logits: Floats, sampling: Sampling, tokens: Sequence[int], prompted: int, rounding: float
) -> Mask:
    """Mark the tokens that may come after ``tokens``, the first of which are the prompt.

    The engine's logits may differ from these by ``rounding`` times the largest, so a token that
    is as close to a bound may lie on either side of it. Of tokens that tie, each may be chosen.
    """
    scaled = _scaled(logits, sampling, tokens, prompted)
    return _kept(scaled, sampling, room=2 * rounding * float(np.abs(scaled).max()))


def _scaled(logits: Floats, sampling: Sampling, tokens: Sequence[int], prompted: int) -> Floats:
    """Apply penalties and the temperature."""
    scaled = np.array(logits, dtype=np.float64)
    seen = np.unique(np.asarray(tokens, dtype=np.int64))
    penalty = sampling.repetition_penalty
    scaled[seen] = np.where(scaled[seen] > 0, scaled[seen] / penalty, scaled[seen] * penalty)
    for token, count in Counter(tokens[prompted:]).items():
        scaled[token] -= getattr(sampling, "presence_penalty", 0.0)
        scaled[token] -= count * getattr(sampling, "frequency_penalty", 0.0)
    return scaled / (sampling.temperature or 1.0)


def _kept(scaled: Floats, sampling: Sampling, *, room: float) -> Mask:
    """Mark the tokens that no bound excludes, by ``room`` or more; the likeliest always stays."""
    likeliest: Mask = scaled >= scaled.max() - room
    if sampling.temperature == 0:
        return likeliest
    kept: Mask = np.ones(len(scaled), dtype=np.bool_)
    if 0 < sampling.top_k < len(scaled):
        kept = scaled >= np.sort(scaled)[-sampling.top_k] - room
    if sampling.top_p < 1:
        kept &= _within_top_p(np.where(kept, scaled, -np.inf), sampling.top_p, room)
    min_p = getattr(sampling, "min_p", 0.0)
    if min_p > 0:
        kept &= scaled >= scaled.max() + np.log(min_p) - room
    kept |= likeliest
    return kept


def _within_top_p(scaled: Floats, top_p: float, room: float) -> Mask:
    """Mark the likeliest tokens up to the one with which they have the probability ``top_p``.

    Of tokens that are as likely but for rounding, any may come first.
    """
    descending = np.sort(scaled)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(np.exp(log_probabilities(descending)))])
    clearly_above = np.searchsorted(-descending, -(scaled + room), side="left")
    slack = _SUM_ERROR if room else 0.0
    within: Mask = sums[clearly_above] * np.exp(-2 * room) - slack < top_p
    return within


_LOGPROBS_SUM_ERROR = 1e-5
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
    return 2 * adapter.rounding * float(np.abs(logits).max()) + _LOGPROBS_SUM_ERROR


def _logits(adapter: EngineAdapter, mix: RequestMix, before: Sequence[int]) -> Floats:
    return floats(adapter.logits(before, mix))
