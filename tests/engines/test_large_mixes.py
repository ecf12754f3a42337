"""Large mixes of requests: their drawing, and bugs that they find."""

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
    """Stores only the first 256 tokens of a prompt."""

    def read_prompt(self, request: ToyRequest) -> None:
        request.prompt = request.prompt[:256]
        super().read_prompt(request)


class TruncatesLongPrompts(Sized):
    engine_type = ShortBuffer


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checks, "_SECONDS_OF_LARGE_MIXES", 2.0)
    with fresh_run(replace(settings.current(), gpu=True, seed=1, failures_dir=None)):
        yield


def search(adapter: type[ToyAdapter]) -> None:
    tests: Any = conformance(adapter)()
    tests.test_requests_of_any_size_get_what_they_get_alone()


@pytest.mark.usefixtures("_on_a_gpu")
def test_right_engine_passes_large_mixes() -> None:
    search(Sized)
    assert current().of(Sized).histories > 10


@pytest.mark.usefixtures("_on_a_gpu")
def test_short_buffer_is_found_with_a_small_mix() -> None:
    with pytest.raises(MixDivergence) as caught:
        search(TruncatesLongPrompts)
    lengths = [len(each.prompt) for each in caught.value.mix.requests]
    assert sorted(lengths)[-1] in (257, 600)
    assert len(lengths) <= 2


@pytest.mark.usefixtures("_on_a_gpu")
def test_failing_large_mix_is_shrunk_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class TakesLong(ShortBuffer):
        def read_prompt(self, request: ToyRequest) -> None:
            now[0] += 3.0 * (len(request.prompt) > 256)
            super().read_prompt(request)

    class SlowWithLongPrompts(Sized):
        engine_type = TakesLong

    for module in (checks, search_module):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 1e9)
    with pytest.raises(MixDivergence) as caught:
        search(SlowWithLongPrompts)
    assert len(caught.value.mix.requests) <= 2


def test_engine_without_sizes_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="no sizes to vary"):
        search(ToyAdapter)


@pytest.mark.slow
@pytest.mark.parametrize("few_sizes", [None, 2])
def test_large_mixes_cover_the_sizes(few_sizes: int | None) -> None:
    mixes: list[RequestMix] = []

    @hypothesis_settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(large_mixes(Sized, few=few_sizes))
    def draw(mix: RequestMix) -> None:
        mixes.append(mix)
        lengths = [len(each.prompt) + each.sampling.max_new_tokens for each in mix.requests]
        assert max(lengths) <= min(Sized.large_mix_tokens, mix.cache_tokens)

    draw()
    assert {mix.options["batch_size"] for mix in mixes} == set(
        Sized.sizes["batch_size"][:few_sizes]
    )
    assert len({mix.block_size for mix in mixes}) == (few_sizes or 6)
    longest = {max(len(each.prompt) for each in mix.requests) for mix in mixes}
    assert {1, 257, 600} <= longest
    assert {1, 100} <= {len(mix.requests) for mix in mixes}
    # Beyond the first index buffer, and beyond the buffers of the ring.
    pages = [sum(-(-len(each.prompt) // mix.block_size) for each in mix.requests) for mix in mixes]
    assert min(pages) < 256 < max(pages)


def test_roseinfer_serves_large_mixes(device: str) -> None:
    """The engine runs its kernels on a GPU, and torch operations elsewhere."""
    torch_options = {} if device == "cuda" else {"paged_attention": False, "fused_model": False}

    @hypothesis_settings(max_examples=6, deadline=None, database=None, derandomize=True)
    @given(large_mixes(RoseinferEngine, device=device, few=1))
    def serve(mix: RequestMix) -> None:
        run_mix(RoseinferEngine, replace(mix, options={**mix.options, **torch_options}))

    serve()
