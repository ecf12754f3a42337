"""Small mixes of requests for the toy engine, and their failures."""

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

DEFAULT_OPTIONS = {"batch_size": 2, "prefixes": False}
GREEDY = Sampling(max_new_tokens=4, ignore_eos=True)


def mix(*requests: RequestSpec, room: int = 64, **options: Any) -> RequestMix:
    return RequestMix(requests, cache_tokens=room, options={**DEFAULT_OPTIONS, **options})


def request_spec(*prompt: int, sampling: Sampling = GREEDY, **fields: Any) -> RequestSpec:
    return RequestSpec(prompt, sampling, **fields)


def reason(adapter: type[EngineAdapter], requests: RequestMix) -> str:
    """Return the first line of the message of a failing mix."""
    with pytest.raises(MixDivergence) as caught:
        run_mix(adapter, requests)
    return str(caught.value).partition("\n")[0]
