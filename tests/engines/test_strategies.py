"""Mixes of requests are drawn as adapters were promised, and of every kind."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pytest_roseinfer.engines.strategies import common_text, prompts, request_mixes, samplings
from tests.engine_capabilities.engines.toy_engine import ToyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer import EngineAdapter, RequestMix, Sampling


class SmallAdapter(ToyAdapter):
    vocabulary = 3
    most_tokens = 7


@pytest.mark.parametrize("adapter", [ToyAdapter, SmallAdapter])
@pytest.mark.parametrize("most_steps", [1, 12])
def test_mixes_are_what_adapters_are_promised(
    adapter: type[EngineAdapter], most_steps: int
) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(request_mixes(adapter, most_steps=most_steps, device="cuda:1"))
    def check(drawn: RequestMix) -> None:
        assert drawn.device == "cuda:1"
        assert drawn.block_size in adapter.block_sizes
        assert drawn.options.keys() == adapter.option_choices.keys()
        for name, value in drawn.options.items():
            assert value in adapter.option_choices[name]
        arrivals = [each.arrival for each in drawn.requests]
        assert arrivals == sorted(arrivals)
        assert 0 < len(arrivals) == drawn.size <= 6
        for each in drawn.requests:
            assert each.prompt
            assert all(0 <= token < adapter.vocabulary for token in each.prompt)
            most = len(each.prompt) + each.sampling.max_new_tokens
            assert most <= min(adapter.most_tokens, drawn.cache_tokens)
            assert 1 <= each.sampling.max_new_tokens <= most_steps
            assert each.cancel_after is None or each.cancel_after >= 0

    check()


@given(request_mixes(ToyAdapter, aim="from a prefix"))
@settings(max_examples=30, deadline=None, database=None)
def test_an_aim_sets_the_switches_its_path_needs(drawn: RequestMix) -> None:
    assert drawn.options["prefixes"] is True


@pytest.mark.parametrize(
    "wanted",
    [
        lambda drawn: drawn.cache_tokens == max(sizes(drawn)) < sum(sizes(drawn)) / 3,
        lambda drawn: drawn.cache_tokens >= sum(sizes(drawn)) and drawn.size > 2,
        lambda drawn: any(
            len(a.prompt) > 8 and a.prompt[:8] == b.prompt[:8] and a.prompt != b.prompt
            for a in drawn.requests
            for b in drawn.requests
        ),
        lambda drawn: any(each.cancel_after == 0 for each in drawn.requests),
        lambda drawn: drawn.requests[-1].arrival > 5,
        lambda drawn: all(each.sampling.temperature for each in drawn.requests),
    ],
    ids=["crowded", "roomy", "sharing a prefix", "cancelled at once", "late", "drawn"],
)
def test_mixes_are_of_every_kind(wanted: Callable[[RequestMix], bool]) -> None:
    """``find`` raises where it finds none."""
    find(
        request_mixes(ToyAdapter),
        wanted,
        settings=settings(max_examples=500, database=None, phases=[Phase.generate]),
        random=Random(1),
    )


def sizes(drawn: RequestMix) -> list[int]:
    return [len(each.prompt) + each.sampling.max_new_tokens for each in drawn.requests]


@given(prompts(vocabulary=7, longest=9), samplings(most=4), st.integers(0, 20))
@settings(max_examples=60, deadline=None, database=None)
def test_prompts_and_samplings_are_useful_alone(
    prompt: tuple[int, ...], sampling: Sampling, length: int
) -> None:
    assert 1 <= len(prompt) <= 9
    assert set(prompt) <= set(range(7))
    # The first token may be another one.
    agreeing = [at for at in range(1, len(prompt)) if prompt[1:at] == text(7, 9)[1:at]]
    assert len(prompt) - max(agreeing, default=1) <= 2
    assert 1 <= sampling.max_new_tokens <= 4
    assert text(7, length) == text(7, 20)[:length]


def text(vocabulary: int, length: int) -> tuple[int, ...]:
    return common_text(length, vocabulary)
