"""Prompt admission: prompts are submitted as steps need them, and steps stay the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.engine.engine import Engine

if TYPE_CHECKING:
    from roseinfer.engine.scheduler import Step

Steps = list[tuple[list[int], list[tuple[int, int]]]]
"""Ids that decode in each step, and ids that store prompt tokens with their counts."""
SHORT = SamplingParams(max_new_tokens=3, ignore_eos=True)


class RecordedLLM:
    """LLM that records its steps, each with the number of submitted requests when it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.llm = LLM("tiny", device="cpu", max_length=64, block_size=4, **config)
        self.steps: Steps = []
        self.num_submitted: list[int] = []
        launch = self.llm.engine._launch

        def recorded_launch(step: Step) -> None:
            chunks = [(request.id, count) for request, count in step.chunks]
            self.steps.append(([request.id for request in step.decoding], chunks))
            self.num_submitted.append(self.llm.engine._next_id)
            launch(step)

        monkeypatch.setattr(self.llm.engine, "_launch", recorded_launch)

    def texts(self, prompts: list[list[int]], params: Any = SHORT) -> list[list[int]]:
        return [output.token_ids for output in self.llm.generate(prompts, params, progress=False)]


def draw_workload(seed: int) -> tuple[list[list[int]], list[SamplingParams], dict[str, Any]]:
    """Draw prompts of all lengths, many with shared prefixes, with parameters and settings."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 200) for _ in range(30)]
    prompts = []
    for _ in range(rng.randrange(1, 90)):
        num_shared = rng.choice((0, 0, 3, 9, 30))
        prompts.append(
            shared[:num_shared] + [rng.randrange(2, 200) for _ in range(rng.randrange(1, 9))]
        )
    params = [SamplingParams(max_new_tokens=rng.randrange(1, 6), ignore_eos=True) for _ in prompts]
    return prompts, params, {
        "max_batch_size": rng.choice((2, 5, 80)),
        "kv_cache_tokens": rng.choice((64, 256, 4096)),
        "prefill_max_tokens": rng.choice((3, 16, 60, 500)),
        "prefill_max_batch_size": rng.choice((1, 3, 16, 70)),
        "prefill_admission_policy": rng.choice(("fifo", "pack")),
        "chunked_prefill": rng.random() < 0.7,
        "prefix_cache": rng.random() < 0.7,
    }  # fmt: skip


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed", range(12))
def test_steps_equal_those_with_all_prompts_submitted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params, config = draw_workload(seed)
    one_by_one = RecordedLLM(monkeypatch, **config)
    expected = one_by_one.texts(prompts, params)
    again = one_by_one.texts(prompts, params)  # with hits in the prefix cache
    monkeypatch.setattr(Engine, "has_full_lookahead", property(lambda _: False))
    at_once = RecordedLLM(monkeypatch, **config)
    assert at_once.texts(prompts, params) == expected
    assert at_once.texts(prompts, params) == again
    assert at_once.steps == one_by_one.steps
    assert at_once.num_submitted[0] == len(prompts)


def test_step_starts_once_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedLLM(monkeypatch, prefill_max_tokens=10)
    recorded.texts([[7 + at] * 4 for at in range(9)])
    assert recorded.num_submitted[:3] == [3, 6, 8]

    recorded = RecordedLLM(monkeypatch, prefill_max_batch_size=2)
    recorded.texts([[7 + at] * 4 for at in range(9)])
    assert recorded.num_submitted[:3] == [2, 4, 6]


@pytest.mark.parametrize("cached", [12, 2], ids=["blocks", "a part of one"])
def test_cached_prefix_tokens_do_not_fill_a_step(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedLLM(monkeypatch, prefill_max_tokens=10)
    recorded.texts([[9] * cached], SamplingParams(max_new_tokens=1, ignore_eos=True))
    before = len(recorded.steps)
    recorded.texts([[9] * cached + [at] for at in range(2, 9)])
    num_submitted, (decoding, chunks) = recorded.num_submitted[before], recorded.steps[before]
    assert num_submitted == 8, "expected the previous prompt and all seven"
    assert not decoding
    assert len(chunks) == 7


def test_rejected_prompts_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedLLM(monkeypatch, prefill_max_tokens=4)
    outputs = recorded.llm.generate([[5] * 4, [6] * 100, [7] * 4, [8] * 100], SHORT, progress=False)
    reasons = [output.finish_reason for output in outputs]
    assert reasons == ["length", "error", "length", "error"]
    assert recorded.num_submitted[0] == 1
