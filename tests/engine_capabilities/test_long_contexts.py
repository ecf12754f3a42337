"""Long contexts: mixes that aim at a path with a limit have a longer request, and count it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import MixDivergence, RequestMix, conformance, run_mix
from pytest_roseinfer.engine_capabilities.capability import required_conditions
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.targets.engine_models import PART_TOKENS
from roseinfer.kernels.triton.softmax import num_context_parts
from tests.engine_capabilities.engines.small_mixes import mix, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_roseinfer import EngineAdapter
    from tests.engine_capabilities.engines.toy_engine import ToyRequest

LIMIT = 100


class LimitedAdapter(ToyAdapter):
    """Reads prompts of more than 100 tokens from a prefix, if there is one, in two parts."""

    long_contexts: ClassVar[Mapping[str, int]] = {"from a prefix": LIMIT}


class DropsAPartEngine(ToyEngine):
    def read_prompt(self, request: ToyRequest) -> None:
        super().read_prompt(request)
        if self.prefixes is not None and len(request.prompt) > LIMIT:
            request.checksum = crc32(bytes(request.prompt[:LIMIT]))


class DropsAPart(LimitedAdapter):
    engine_type = DropsAPartEngine


def search(
    adapter: type[EngineAdapter], aim: str | None, serve: Callable[[RequestMix], object]
) -> None:
    @hypothesis_settings(
        max_examples=80,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(request_mixes(adapter, aim=aim))
    def attempt(mix: RequestMix) -> None:
        serve(mix)

    attempt()


def longest(mix: RequestMix) -> int:
    return max(len(each.prompt) for each in mix.requests)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("aim", "fewest", "most"), [("from a prefix", 25, 60), ("together", 0, 0), (None, 1, 15)]
)
def test_mixes_that_aim_at_a_limited_path_are_long(aim: str | None, fewest: int, most: int) -> None:
    lengths: list[int] = []
    search(LimitedAdapter, aim, lambda mix: lengths.append(longest(mix)))
    assert fewest <= sum(length > LIMIT for length in lengths) <= most


def test_first_mix_that_aims_at_a_limited_path_is_long() -> None:
    """Searches of slow paths have few mixes."""
    mixes: list[RequestMix] = []
    search(LimitedAdapter, "from a prefix", mixes.append)
    assert longest(mixes[0]) > LIMIT
    assert mixes[0].options["prefixes"]


def test_part_that_is_dropped_is_found() -> None:
    with pytest.raises(MixDivergence, match="alone it gets"):
        search(DropsAPart, "from a prefix", lambda mix: run_mix(DropsAPart, mix))
    search(DropsAPart, "together", lambda mix: run_mix(DropsAPart, mix))


@pytest.mark.parametrize(("length", "times"), [(LIMIT - 4, 0), (LIMIT - 3, 1), (LIMIT + 1, 1)])
def test_contexts_beyond_the_limit_are_counted_once(length: int, times: int) -> None:
    """A request of four tokens gets its last at ``length + 4``."""
    long = request_spec(*([1] * length))
    counts = run_mix(LimitedAdapter, mix(long, room=200, prefixes=True))
    assert counts["context_longer_than_a_part"] == times


def test_paths_that_cannot_run_are_not_counted() -> None:
    counts = run_mix(LimitedAdapter, mix(request_spec(*([1] * (LIMIT + 1))), room=200))
    assert not counts["context_longer_than_a_part"]


def test_condition_needs_a_limit() -> None:
    name = "context_longer_than_a_part"
    assert name in required_conditions(LimitedAdapter)
    assert name not in required_conditions(ToyAdapter)


def test_limit_of_an_unknown_path_is_refused() -> None:
    wrong = type("Mine", (ToyAdapter,), {"long_contexts": {"fast": 9}})
    with pytest.raises(TypeError, match="long_contexts names 'fast', which is not among"):
        conformance(wrong)


def test_kernels_split_contexts_at_the_declared_limit() -> None:
    assert [num_context_parts(tokens) for tokens in (PART_TOKENS, PART_TOKENS + 1)] == [1, 2]


def test_paths_of_another_device_need_no_long_contexts() -> None:
    paths = {name: replace(path, device="cuda") for name, path in LimitedAdapter.paths.items()}
    adapter: type[ToyAdapter] = type("OnGpu", (LimitedAdapter,), {"paths": paths})
    assert "context_longer_than_a_part" not in required_conditions(adapter)
    lengths: list[int] = []
    search(adapter, None, lambda mix: lengths.append(longest(mix)))
    assert max(lengths) <= LIMIT
