"""transformers' engine fits the harness, which finds in it what docs/found.md says."""

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
"""The version that docs/found.md is about."""
SCRIPTS = scripts_about(f"`generate_batch` of transformers {VERSION}")
WRONG_TOKEN = r"request \d, token \d+: \d+(; alone it gets \d+|, which its parameters rule out)"
USUAL = {name: values[0] for name, values in TransformersEngine.option_choices.items()}

only_that_version = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"docs/found.md is about transformers {VERSION}"
)


class GoesOn(TransformersEngine):
    """That nobody goes on after the last is cancelled is known."""

    def step(self) -> None:
        scheduler = self.processor.scheduler
        scheduler.block_new_requests &= bool(scheduler.active_requests)
        super().step()


class ReadsAWindowTooFarBack(GoesOn):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **GoesOn.option_choices,
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
    return RequestMix(requests, cache_tokens=room, options=USUAL)


def test_it_conforms_but_for_what_is_known() -> None:
    assert verdicts_of(GoesOn, examples=12) == ["equal"] * 4


def test_a_window_that_is_read_too_far_back_is_caught() -> None:
    with pytest.raises(MixDivergence, match=WRONG_TOKEN):
        verdicts_of(ReadsAWindowTooFarBack, examples=12)


def test_a_hash_that_forgets_what_came_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cache_allocator.compute_block_hash
    monkeypatch.setattr(cache_allocator, "compute_block_hash", lambda _, own: right(None, own))
    behind_others = RequestSpec((1, 2, 3, 4, 9, 17, 26, 11, 5), Sampling(2))
    at_the_beginning = RequestSpec((9, 17, 26, 11, 7), Sampling(8), arrival=3)
    with pytest.raises(MixDivergence, match=WRONG_TOKEN):
        run_mix(GoesOn, mix(behind_others, at_the_beginning, room=64))


@only_that_version
def test_who_made_room_waits_for_ever_once_the_others_are_cancelled() -> None:
    leaves = RequestSpec((5,), Sampling(6), cancel_after=5)
    crowd = mix(leaves, RequestSpec((1,), Sampling(5)), room=7)
    with pytest.raises(MixDivergence, match=r"requests \[1\] have not ended after \d+ steps"):
        run_mix(TransformersEngine, crowd)
    run_mix(GoesOn, crowd)


@only_that_version
def test_two_answers_for_one_token_end_it() -> None:
    one, two = (mix(*[RequestSpec(prompt, Sampling(3))] * 2, room=16) for prompt in ((1,), (1, 2)))
    run_forks(ForkingTransformersEngine, two)
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        run_forks(ForkingTransformersEngine, one)


@only_that_version
@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_script_of_found_md_prints_what_it_says(script: str, printed: str) -> None:
    assert run_python(script, warm=True) == printed
