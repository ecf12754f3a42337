"""Mixes of requests of any size: what is drawn, and what a search with them finds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import MixDivergence, conformance, settings
from pytest_roseinfer.engines.run import run_mix
from pytest_roseinfer.engines.strategies import large_mixes
from pytest_roseinfer.run.coverage import current
from pytest_roseinfer.search import search as search_module
from pytest_roseinfer.search import shrink
from pytest_roseinfer.suite import engine_tests as checks
from pytest_roseinfer.targets.roseinfer_engine import RoseinferEngine
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine
from tests.fresh_run import fresh_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer import RequestMix
    from tests.engine_capabilities.engines.toy_engine import ToyRequest


class Sized(ToyAdapter):
    sizes: ClassVar[Mapping[str, Sequence[Any]]] = {"batch_size": (1, 8, 64, 100)}


class ShortBuffer(ToyEngine):
    """It keeps no more than the first 256 tokens of a prompt."""

    def read_prompt(self, request: ToyRequest) -> None:
        request.prompt = request.prompt[:256]
        super().read_prompt(request)


class ForgetsLongPrompts(Sized):
    engine_type = ShortBuffer


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checks, "_SECONDS_OF_LARGE_MIXES", 2.0)
    with fresh_run(replace(settings.current(), gpu=True, seed=1, failures_dir=None)):
        yield


def search(adapter: type[ToyAdapter]) -> None:
    made: Any = conformance(adapter)()
    made.test_requests_of_any_size_get_what_they_get_alone()


@pytest.mark.usefixtures("_on_a_gpu")
def test_an_engine_that_is_right_passes() -> None:
    search(Sized)
    assert current().of(Sized).histories > 10


@pytest.mark.usefixtures("_on_a_gpu")
def test_a_buffer_that_is_too_short_is_found_and_shown_small() -> None:
    with pytest.raises(MixDivergence) as caught:
        search(ForgetsLongPrompts)
    lengths = [len(each.prompt) for each in caught.value.mix.requests]
    assert sorted(lengths)[-1] in (257, 600)
    assert len(lengths) <= 2


@pytest.mark.usefixtures("_on_a_gpu")
def test_what_fails_is_made_small_though_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class TakesLong(ShortBuffer):
        def read_prompt(self, request: ToyRequest) -> None:
            now[0] += 3.0 * (len(request.prompt) > 256)
            super().read_prompt(request)

    class Late(Sized):
        engine_type = TakesLong

    for module in (checks, search_module):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 1e9)
    with pytest.raises(MixDivergence) as caught:
        search(Late)
    assert len(caught.value.mix.requests) <= 2


def test_an_engine_without_sizes_is_left_alone() -> None:
    with pytest.raises(pytest.skip.Exception, match="no sizes to vary"):
        search(ToyAdapter)


@pytest.mark.parametrize("few", [None, 2])
def test_what_is_drawn(few: int | None) -> None:
    seen: list[RequestMix] = []

    @hypothesis_settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(large_mixes(Sized, few=few))
    def draw(drawn: RequestMix) -> None:
        seen.append(drawn)
        lengths = [len(each.prompt) + each.sampling.max_new_tokens for each in drawn.requests]
        assert max(lengths) <= min(Sized.large_mix_tokens, drawn.cache_tokens)

    draw()
    assert {drawn.options["batch_size"] for drawn in seen} == set(Sized.sizes["batch_size"][:few])
    assert len({drawn.block_size for drawn in seen}) == (few or 6)
    longest = {max(len(each.prompt) for each in drawn.requests) for drawn in seen}
    assert {1, 257, 600} <= longest
    assert {1, 100} <= {len(drawn.requests) for drawn in seen}
    # Beyond the first index buffer, and beyond what goes through the ring of them at all.
    pages = [
        sum(-(-len(each.prompt) // drawn.block_size) for each in drawn.requests) for drawn in seen
    ]
    assert min(pages) < 256 < max(pages)


def test_our_engine_serves_some(device: str) -> None:
    """The engine runs its kernels on a GPU, and torch's own operations elsewhere."""
    slow = {} if device == "cuda" else {"paged_attention": False, "fused_model": False}

    @hypothesis_settings(max_examples=6, deadline=None, database=None, derandomize=True)
    @given(large_mixes(RoseinferEngine, device=device, few=1))
    def serve(drawn: RequestMix) -> None:
        run_mix(RoseinferEngine, replace(drawn, options={**drawn.options, **slow}))

    serve()
