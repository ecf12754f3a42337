"""The draws of roseinfer's engine, anew in numpy: a token's noise is a hash of where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pytest_roseinfer.engines.twins import distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.mix import Sampling
    from pytest_roseinfer.engines.twins import Floats

_WORD = (1 << 64) - 1


def draw(logits: Floats, sampling: Sampling, tokens: Sequence[int], prompted: int) -> int:
    """Return the token that comes after ``tokens``, the first of which are the prompt."""
    likely = distribution(logits, sampling, tokens, prompted)
    place = _scrambled(_scrambled(sampling.seed & _WORD) + len(tokens))
    hashes = [_scrambled(place + token) >> 40 for token in range(len(likely))]
    noise = -np.log(-np.log((np.array(hashes) + 0.5) / (1 << 24)))
    return int((likely + noise).argmax())


def _scrambled(number: int) -> int:
    """Scramble 64 bits as SplitMix64 does, which its authors publish with these numbers."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _WORD
    return number ^ (number >> 31)
