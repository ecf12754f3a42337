"""transformers' engine: conformance, and the findings of docs/findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import transformers
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from pytest_roseinfer import (
    MixDivergence,
    RequestMix,
    RequestSpec,
    Sampling,
    run_forks,
    run_mix,
)
from pytest_roseinfer.targets import engine_models as shapes
from pytest_roseinfer.targets.transformers_engine import (
    ForkingTransformersEngine,
    TransformersEngine,
)
from tests.others.engine_search import verdicts_of
from tests.others.found_scripts import scripts_about
from tests.python_process import run_python

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = "5.23.0"
"""The version that docs/findings is about."""
SCRIPTS = scripts_about(f"transformers {VERSION}: `generate_batch`")
WRONG_TOKEN = (
    r"request \d, token \d+: "
    r"(\d+(; alone it gets \d+|, which its parameters rule out)|log-probability .*; by the model)"
)
DEFAULT_OPTIONS = {name: values[0] for name, values in TransformersEngine.option_choices.items()}

only_documented_version = pytest.mark.skipif(
    transformers.__version__ != VERSION,
    reason=f"docs/findings is about transformers {VERSION}",
)


class ResumesAdmission(TransformersEngine):
    """Admits requests again when none is active, to pass over a known finding."""

    def step(self) -> None:
        scheduler = self.processor.scheduler
        scheduler.block_new_requests &= bool(scheduler.active_requests)
        super().step()


class ReadsBeforeTheWindow(ResumesAdmission):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **ResumesAdmission.option_choices,
        "model": shapes.WITH_WINDOWS_ALONE,
    }

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        allocator = self.cache.cache_allocators["sliding_attention"]

        def wrong(name: str, past: int, count: int) -> list[int]:
            length = min(past, allocator.sliding_window - 1)
            slots = allocator._token_indices_to_physical_indices(name, 0, length)
            return [*slots, *[allocator.sentinel_index] * count]

        allocator.get_read_indices = wrong


def mix(*requests: RequestSpec, room: int) -> RequestMix:
    return RequestMix(requests, cache_tokens=room, options=DEFAULT_OPTIONS)


@pytest.mark.slow
def test_engine_conforms_apart_from_known_findings() -> None:
    assert verdicts_of(ResumesAdmission, examples=12)[:4] == ["equal"] * 4


def test_reading_before_the_window_is_caught() -> None:
    with pytest.raises(MixDivergence, match=WRONG_TOKEN):
        verdicts_of(ReadsBeforeTheWindow, examples=12)


def test_block_hash_without_the_prefix_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cache_allocator.compute_block_hash
    monkeypatch.setattr(cache_allocator, "compute_block_hash", lambda _, own: right(None, own))
    after_a_prefix = RequestSpec((1, 2, 3, 4, 9, 17, 26, 11, 5), Sampling(2))
    at_position_0 = RequestSpec((9, 17, 26, 11, 7), Sampling(8), arrival=3)
    with pytest.raises(MixDivergence, match=WRONG_TOKEN):
        run_mix(ResumesAdmission, mix(after_a_prefix, at_position_0, room=64))


@only_documented_version
def test_preempted_request_waits_forever_once_the_others_are_cancelled() -> None:
    cancelled = RequestSpec((5,), Sampling(6), cancel_after=5)
    full_cache = mix(cancelled, RequestSpec((1,), Sampling(5)), room=7)
    with pytest.raises(MixDivergence, match=r"requests \[1\] have not ended after \d+ steps"):
        run_mix(TransformersEngine, full_cache)
    run_mix(ResumesAdmission, full_cache)


@only_documented_version
def test_forking_a_prompt_of_one_token_fails() -> None:
    one_token, two_tokens = (
        mix(*[RequestSpec(prompt, Sampling(3))] * 2, room=16) for prompt in ((1,), (1, 2))
    )
    run_forks(ForkingTransformersEngine, two_tokens)
    with pytest.raises(MixDivergence, match="RuntimeError: cannot reshape tensor of 0 elements"):
        run_forks(ForkingTransformersEngine, one_token)


@pytest.mark.sampled_cases
@only_documented_version
@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_documented_script_prints_its_output(script: str, printed: str) -> None:
    assert run_python(script, warm=True) == printed
