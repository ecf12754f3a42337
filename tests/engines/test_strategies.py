"""Drawn mixes of requests: they keep to the adapter's limits, and are of every kind."""

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
    max_tokens = 7


@pytest.mark.sampled_cases
@pytest.mark.parametrize("adapter", [ToyAdapter, SmallAdapter])
@pytest.mark.parametrize("max_steps", [1, 12])
def test_mixes_keep_to_the_limits_of_the_adapter(
    adapter: type[EngineAdapter], max_steps: int
) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(request_mixes(adapter, max_steps=max_steps, device="cuda:1"))
    def check(mix: RequestMix) -> None:
        assert mix.device == "cuda:1"
        assert mix.block_size in adapter.block_sizes
        assert mix.options.keys() == adapter.option_choices.keys()
        for name, value in mix.options.items():
            assert value in adapter.option_choices[name]
        arrivals = [each.arrival for each in mix.requests]
        assert arrivals == sorted(arrivals)
        assert 0 < len(arrivals) == mix.size <= 6
        for each in mix.requests:
            assert each.prompt
            assert all(0 <= token < adapter.vocabulary for token in each.prompt)
            max_total = len(each.prompt) + each.sampling.max_new_tokens
            assert max_total <= min(adapter.max_tokens, mix.cache_tokens)
            assert 1 <= each.sampling.max_new_tokens <= max_steps
            assert each.cancel_after is None or each.cancel_after >= 0

    check()


@given(request_mixes(ToyAdapter, aim="from a prefix"))
@settings(max_examples=30, deadline=None, database=None)
def test_aim_sets_the_options_its_path_needs(mix: RequestMix) -> None:
    assert mix.options["prefixes"] is True


@pytest.mark.parametrize(
    "condition",
    [
        lambda mix: mix.cache_tokens == max(sizes(mix)) < sum(sizes(mix)) / 3,
        lambda mix: mix.cache_tokens >= sum(sizes(mix)) and mix.size > 2,
        lambda mix: any(
            len(a.prompt) > 8 and a.prompt[:8] == b.prompt[:8] and a.prompt != b.prompt
            for a in mix.requests
            for b in mix.requests
        ),
        lambda mix: any(each.cancel_after == 0 for each in mix.requests),
        lambda mix: mix.requests[-1].arrival > 5,
        lambda mix: all(each.sampling.temperature for each in mix.requests),
    ],
    ids=["crowded", "roomy", "sharing a prefix", "cancelled at once", "late", "drawn"],
)
def test_mixes_of_every_kind_are_drawn(condition: Callable[[RequestMix], bool]) -> None:
    """``find`` raises an error where no mix of the kind is drawn."""
    find(
        request_mixes(ToyAdapter),
        condition,
        settings=settings(max_examples=500, database=None, phases=[Phase.generate]),
        random=Random(1),
    )


def sizes(mix: RequestMix) -> list[int]:
    return [len(each.prompt) + each.sampling.max_new_tokens for each in mix.requests]


@given(prompts(vocabulary=7, longest=9), samplings(max_tokens=4), st.integers(0, 20))
@settings(max_examples=60, deadline=None, database=None)
def test_prompts_and_samplings_are_valid_by_themselves(
    prompt: tuple[int, ...], sampling: Sampling, length: int
) -> None:
    assert 1 <= len(prompt) <= 9
    assert set(prompt) <= set(range(7))
    # The first token may differ.
    common_lengths = [at for at in range(1, len(prompt)) if prompt[1:at] == text_prefix(7, 9)[1:at]]
    assert len(prompt) - max(common_lengths, default=1) <= 2
    assert 1 <= sampling.max_new_tokens <= 4
    assert text_prefix(7, length) == text_prefix(7, 20)[:length]


def text_prefix(vocabulary: int, length: int) -> tuple[int, ...]:
    return common_text(length, vocabulary)
