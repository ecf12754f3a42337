"""Baseline of the search over mixes: requests with independent random parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling
from pytest_roseinfer.engines.run import run_mix
from tests.mutants.random_search import search_at_random

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter
    from tests.mutants.hunt import Failure
    from tests.mutants.tally import Tally

_MAX_REQUESTS = 6
_MAX_NEW_TOKENS = 12
_MAX_STEPS = 10


def run(
    targets: Sequence[type[EngineAdapter]], seed: int, requests: int, tally: Tally
) -> Failure | None:
    """Run random mixes until one fails or the number of requests is reached."""
    tally.check = "random requests"
    return search_at_random(
        targets, random_mix, run_mix, seed=seed, operations=requests, tally=tally
    )


def random_mix(rng: random.Random, target: type[EngineAdapter]) -> RequestMix:
    specs = tuple(_request(rng, target) for _ in range(rng.randint(1, _MAX_REQUESTS)))
    sizes = [len(each.prompt) + each.sampling.max_new_tokens for each in specs]
    options: dict[str, Any] = {
        name: rng.choice(values) for name, values in target.option_choices.items()
    }
    return RequestMix(
        specs, rng.randint(1, 16), rng.randint(max(sizes), sum(sizes)), options=options
    )


def _request(rng: random.Random, target: type[EngineAdapter]) -> RequestSpec:
    length = rng.randint(1, target.max_tokens - _MAX_NEW_TOKENS)
    return RequestSpec(
        tuple(rng.randrange(target.vocabulary) for _ in range(length)),
        Sampling(
            rng.randint(1, _MAX_NEW_TOKENS),
            rng.choice((0.0, rng.uniform(0.1, 3.0))),
            top_k=rng.choice((0, rng.randint(1, target.vocabulary))),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.5,
        ),
        rng.randint(0, _MAX_STEPS),
        cancel_after=rng.randint(0, _MAX_STEPS) if rng.random() < 0.2 else None,
    )
