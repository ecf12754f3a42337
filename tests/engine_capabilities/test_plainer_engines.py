"""Engines that offer less: without cancelling, greedy only, and with few block sizes."""

from __future__ import annotations

from dataclasses import replace
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
from pytest_roseinfer.engines.strategies import for_adapter_only, large_mixes, request_mixes
from pytest_roseinfer.search.shrink import passes_of_mixes
from tests.engine_capabilities.engines.broken_engines import ReturnsANeighboursToken
from tests.engine_capabilities.engines.small_mixes import mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import END, VOCABULARY, ToyAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import RequestMix

FEW_EXAMPLES = settings(max_examples=30, deadline=None, database=None)


class Plain(ToyAdapter):
    """Has logits, and no ``generate_alone``."""

    sampling = SamplingTraits(greedy_only=True)
    eos_token = END
    block_sizes: ClassVar[Sequence[int]] = (3, 5)
    cancel = EngineAdapter.cancel
    generate_alone = EngineAdapter.generate_alone

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:  # noqa: ARG002
        greedy_token = crc32(bytes(tokens)) % VOCABULARY
        return [float(token == greedy_token) for token in range(VOCABULARY)]


class Leaking(Plain):
    engine_type = ReturnsANeighboursToken.engine_type


@FEW_EXAMPLES
@given(request_mixes(Plain))
def test_mixes_use_only_offered_features(mix_drawn: RequestMix) -> None:
    assert mix_drawn.block_size in Plain.block_sizes
    requests = [replace(each, ends_early=False, ends_first=False) for each in mix_drawn.requests]
    assert requests == [plain(each) for each in mix_drawn.requests]


def test_early_ends_are_drawn_only_with_a_stop_token() -> None:
    endless = type("Endless", (Plain,), {"eos_token": None})
    spec = RequestSpec((1,), ends_early=True, ends_first=True)
    assert for_adapter_only(Plain, spec) == spec
    assert for_adapter_only(endless, spec) == RequestSpec((1,))


@FEW_EXAMPLES
@given(large_mixes(Plain, few=3))
def test_large_mixes_use_only_offered_features(mix_drawn: RequestMix) -> None:
    assert list(mix_drawn.requests) == [plain(each) for each in mix_drawn.requests]


def plain(each: RequestSpec) -> RequestSpec:
    max_new_tokens, ignore_eos = each.sampling.max_new_tokens, each.sampling.ignore_eos
    return RequestSpec(each.prompt, Sampling(max_new_tokens, ignore_eos=ignore_eos), each.arrival)


def test_shrinking_keeps_to_the_offered_block_sizes() -> None:
    large = mix(request_spec(1))
    smaller = [each for shrink_pass in passes_of_mixes(Plain) for each in shrink_pass(large)]
    assert {each.block_size for each in smaller} == {4, 3}


def test_greedy_tokens_of_logits_are_the_expected_ones() -> None:
    for prompt in ((1,), (2,), (3, 7), (4, 4, 4)):
        for sampling in (Sampling(9), Sampling(9, ignore_eos=True)):
            expected = ToyAdapter().generate_alone(prompt, sampling, mix())
            assert Plain().generate_alone(prompt, sampling, mix()) == expected
    both = mix(request_spec(1, 2), request_spec(4, 2))
    run_mix(Plain, both)
    assert reason(Leaking, both).startswith("request 1, token 0: ")


def test_logits_within_rounding_are_a_near_tie() -> None:
    class Tied(Leaking):
        def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:
            return [max(each, 1 - self.rounding) for each in super().logits(tokens, mix)]

    class Near(Leaking):
        def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:
            return [max(each, 1 - 3 * self.rounding) for each in super().logits(tokens, mix)]

    both = mix(request_spec(1, 2), request_spec(4, 2))
    run_mix(Tied, both)
    assert reason(Near, both).startswith("request 1, token 0: ")


@pytest.mark.parametrize(
    "attributes", [{"sampling": SamplingTraits()}, {"logits": EngineAdapter.logits}]
)
def test_adapter_without_a_slow_twin_is_refused(attributes: dict[str, object]) -> None:
    adapter = type("Lacking", (Plain,), attributes)
    message = "Lacking must define generate_alone, or logits where sampling.greedy_only is True"
    with pytest.raises(TypeError, match=message):
        conformance(adapter)
