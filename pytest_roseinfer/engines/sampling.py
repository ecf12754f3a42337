"""What an engine may choose, computed in numpy from a model's logits and nothing else.

The order is that of transformers: repetition penalty, temperature, top_k, top_p, min_p. OpenAI's
two penalties come behind the first, as vLLM has them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.mix import Sampling

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

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
