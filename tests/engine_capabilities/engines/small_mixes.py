"""Short mixes of requests for the toy engine, and why one fails."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_roseinfer import (
    EngineAdapter,
    MixDivergence,
    RequestMix,
    RequestSpec,
    Sampling,
    run_mix,
)

USUAL = {"batch_size": 2, "prefixes": False}
GREEDY = Sampling(max_new_tokens=4, ignore_eos=True)


def mix(*requests: RequestSpec, room: int = 64, **options: Any) -> RequestMix:
    return RequestMix(requests, cache_tokens=room, options={**USUAL, **options})


def asked(*prompt: int, sampling: Sampling = GREEDY, **fields: Any) -> RequestSpec:
    return RequestSpec(prompt, sampling, **fields)


def reason(adapter: type[EngineAdapter], requests: RequestMix) -> str:
    """Return the first line of what a failing mix says."""
    with pytest.raises(MixDivergence) as caught:
        run_mix(adapter, requests)
    return str(caught.value).partition("\n")[0]
