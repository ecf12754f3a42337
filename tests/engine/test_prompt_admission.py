"""Prompts are taken in as steps need them, and steps are those of all prompts that wait at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.engine.engine import Engine

if TYPE_CHECKING:
    from roseinfer.engine.scheduler import Step

Steps = list[tuple[list[int], list[tuple[int, int]]]]
"""Who decodes, and who stores how many tokens of a prompt."""
SHORT = SamplingParams(max_new_tokens=3, ignore_eos=True)


class Watched:
    """An LLM whose steps are noted, each with how many requests there were when it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.llm = LLM("tiny", device="cpu", max_length=64, block_size=4, **config)
        self.steps: Steps = []
        self.taken_in: list[int] = []
        launch = self.llm.engine._launch

        def noted(step: Step) -> None:
            chunks = [(request.id, count) for request, count in step.chunks]
            self.steps.append(([request.id for request in step.decoding], chunks))
            self.taken_in.append(self.llm.engine._next_id)
            launch(step)

        monkeypatch.setattr(self.llm.engine, "_launch", noted)

    def texts(self, prompts: list[list[int]], params: Any = SHORT) -> list[list[int]]:
        return [output.token_ids for output in self.llm.generate(prompts, params, progress=False)]


def drawn(seed: int) -> tuple[list[list[int]], list[SamplingParams], dict[str, Any]]:
    """Prompts of all lengths, of which many begin alike, and how they are served."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 200) for _ in range(30)]
    prompts = []
    for _ in range(rng.randrange(1, 90)):
        begins = rng.choice((0, 0, 3, 9, 30))
        prompts.append(
            shared[:begins] + [rng.randrange(2, 200) for _ in range(rng.randrange(1, 9))]
        )
    news = [SamplingParams(max_new_tokens=rng.randrange(1, 6), ignore_eos=True) for _ in prompts]
    return prompts, news, {
        "max_batch_size": rng.choice((2, 5, 80)),
        "kv_cache_tokens": rng.choice((64, 256, 4096)),
        "prefill_max_tokens": rng.choice((3, 16, 60, 500)),
        "prefill_max_batch_size": rng.choice((1, 3, 16, 70)),
        "prefill_admission_policy": rng.choice(("fifo", "pack")),
        "chunked_prefill": rng.random() < 0.7,
        "prefix_cache": rng.random() < 0.7,
    }  # fmt: skip


@pytest.mark.many_alike
@pytest.mark.parametrize("seed", range(12))
def test_steps_are_those_of_all_prompts_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params, config = drawn(seed)
    one_by_one = Watched(monkeypatch, **config)
    got = one_by_one.texts(prompts, params)
    again = one_by_one.texts(prompts, params)  # of which the prefix cache has something
    monkeypatch.setattr(Engine, "has_full_lookahead", property(lambda _: False))
    at_once = Watched(monkeypatch, **config)
    assert at_once.texts(prompts, params) == got
    assert at_once.texts(prompts, params) == again
    assert at_once.steps == one_by_one.steps
    assert at_once.taken_in[0] == len(prompts)


def test_a_step_begins_as_soon_as_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, prefill_max_tokens=10)
    watched.texts([[7 + at] * 4 for at in range(9)])
    assert watched.taken_in[:3] == [3, 6, 8]

    watched = Watched(monkeypatch, prefill_max_batch_size=2)
    watched.texts([[7 + at] * 4 for at in range(9)])
    assert watched.taken_in[:3] == [2, 4, 6]


@pytest.mark.parametrize("cached", [12, 2], ids=["blocks", "a part of one"])
def test_what_the_prefix_cache_has_fills_no_step(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, prefill_max_tokens=10)
    watched.texts([[9] * cached], SamplingParams(max_new_tokens=1, ignore_eos=True))
    before = len(watched.steps)
    watched.texts([[9] * cached + [at] for at in range(2, 9)])
    taken_in, (decoding, chunks) = watched.taken_in[before], watched.steps[before]
    assert taken_in == 8, "the one before, and all seven"
    assert not decoding
    assert len(chunks) == 7


def test_those_that_cannot_be_served_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, prefill_max_tokens=4)
    outputs = watched.llm.generate([[5] * 4, [6] * 100, [7] * 4, [8] * 100], SHORT, progress=False)
    reasons = [output.finish_reason for output in outputs]
    assert reasons == ["length", "error", "length", "error"]
    assert watched.taken_in[0] == 1
