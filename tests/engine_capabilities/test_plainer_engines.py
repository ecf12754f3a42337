"""Engines that offer less: no cancelling, only the likeliest tokens, some sizes of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from zlib import crc32

import pytest
from hypothesis import given, settings

from pytest_roseinfer import (
    EngineAdapter,
    RequestSpec,
    Sampling,
    SamplingTraits,
    conformance,
    run_mix,
)
from pytest_roseinfer.engines.strategies import large_mixes, request_mixes
from pytest_roseinfer.search.shrink import passes_of_mixes
from tests.engine_capabilities.engines.broken_engines import ANeighboursTokenLeaksIn
from tests.engine_capabilities.engines.small_mixes import asked, mix, reason
from tests.engine_capabilities.engines.toy_engine import END, VOCABULARY, ToyAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import RequestMix

FEW = settings(max_examples=30, deadline=None, database=None)


class Plain(ToyAdapter):
    """It has no ``generate_alone`` of its own either, but logits."""

    sampling = SamplingTraits(greedy_only=True)
    eos_token = END
    block_sizes: ClassVar[Sequence[int]] = (3, 5)
    cancel = EngineAdapter.cancel
    generate_alone = EngineAdapter.generate_alone

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:  # noqa: ARG002
        likeliest = crc32(bytes(tokens)) % VOCABULARY
        return [float(token == likeliest) for token in range(VOCABULARY)]


class Leaking(Plain):
    engine_type = ANeighboursTokenLeaksIn.engine_type


@FEW
@given(request_mixes(Plain))
def test_nothing_is_asked_of_an_engine_that_it_does_not_offer(drawn: RequestMix) -> None:
    assert drawn.block_size in Plain.block_sizes
    assert list(drawn.requests) == [plain(each) for each in drawn.requests]


@FEW
@given(large_mixes(Plain, few=3))
def test_nor_is_it_among_large_mixes(drawn: RequestMix) -> None:
    assert list(drawn.requests) == [plain(each) for each in drawn.requests]


def plain(each: RequestSpec) -> RequestSpec:
    most, ignore_eos = each.sampling.max_new_tokens, each.sampling.ignore_eos
    return RequestSpec(each.prompt, Sampling(most, ignore_eos=ignore_eos), each.arrival)


def test_a_failing_mix_is_not_tried_with_blocks_that_there_are_not() -> None:
    large = mix(asked(1))
    smaller = [each for passed in passes_of_mixes(Plain) for each in passed(large)]
    assert {each.block_size for each in smaller} == {4, 3}


def test_the_likeliest_tokens_by_logits_are_what_a_request_gets() -> None:
    for prompt in ((1,), (2,), (3, 7), (4, 4, 4)):
        for sampling in (Sampling(9), Sampling(9, ignore_eos=True)):
            right = ToyAdapter().generate_alone(prompt, sampling, mix())
            assert Plain().generate_alone(prompt, sampling, mix()) == right
    both = mix(asked(1, 2), asked(4, 2))
    run_mix(Plain, both)
    assert reason(Leaking, both).startswith("request 1, token 0: ")


def test_two_tokens_that_rounding_may_swap_decide_nothing() -> None:
    class Tied(Leaking):
        def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:
            return [max(each, 1 - self.rounding) for each in super().logits(tokens, mix)]

    class Near(Leaking):
        def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:
            return [max(each, 1 - 3 * self.rounding) for each in super().logits(tokens, mix)]

    both = mix(asked(1, 2), asked(4, 2))
    run_mix(Tied, both)
    assert reason(Near, both).startswith("request 1, token 0: ")


@pytest.mark.parametrize(
    "lacking", [{"sampling": SamplingTraits()}, {"logits": EngineAdapter.logits}]
)
def test_an_adapter_without_a_slow_twin_is_refused(lacking: dict[str, object]) -> None:
    adapter = type("Lacking", (Plain,), lacking)
    said = "Lacking must define generate_alone, or logits where sampling.greedy_only is True"
    with pytest.raises(TypeError, match=said):
        conformance(adapter)
