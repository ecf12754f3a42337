"""Settles what a mix leaves open about a request, by what the slow twin gives for it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.mix import WiderSampling
from pytest_roseinfer.engines.text import stop_strings, up_to_stop

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.adapters.mix import Asked, RequestMix, Sampling

_SEEDS = 24
"""So many are tried for one with which a text ends early."""


def settle(
    adapter: EngineAdapter, asked: Asked, mix: RequestMix
) -> tuple[Sampling, list[int], tuple[str, ...]]:
    """Return a request's parameters, the tokens it must get, and its stop strings."""
    sampling = asked.sampling
    expected = [*adapter.alone(asked.prompt, sampling, mix)]
    for _ in range(_SEEDS if asked.ends_early else 0):
        if 1 < len(expected) < sampling.max_new_tokens:
            break
        sampling = replace(sampling, seed=sampling.seed + 1)
        expected = [*adapter.alone(asked.prompt, sampling, mix)]
    if not (asked.stops and adapter.defines("pieces")):
        return sampling, expected, ()
    stops = stop_strings(asked, adapter.decoded(expected))
    sampling = WiderSampling(**{**asdict(sampling), "stop": stops})
    return sampling, up_to_stop(expected, stops, adapter.decoded), stops
