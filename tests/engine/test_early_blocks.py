"""Early allocation of blocks, for several sequences at a time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from roseinfer.engine.scheduler import Step
from tests.engine.continuations import greedy, small_llm

if TYPE_CHECKING:
    import pytest

    from roseinfer import LLM

REQUESTS, BLOCK, NEW, STEPS = 64, 64, 256, 400


class Token:
    """Result of a step that computes nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def wait(self) -> list[int]:
        return [97] * self.count


def skip_computation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine._runner
    assert runner._resident is not None
    assert runner._prompt_rows is not None
    for steps in (runner._resident.steps, runner._prompt_rows._rows._steps):
        monkeypatch.setattr(steps, "run", lambda *_: None)
        monkeypatch.setattr(steps, "read_back", Token)


def uploads_and_evictions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Serve requests with staggered starts until all blocks are cached or in use.

    Return how often steps after that uploaded block tables and evicted prefixes.
    """
    engine = llm.engine
    resident = engine._runner._resident
    assert resident is not None
    assert engine.prefixes is not None
    uploads = evictions = 0
    put, evict = resident.rows.put_blocks, engine.prefixes.evict

    def counted_put(*args: Any) -> None:
        nonlocal uploads
        uploads += 1
        put(*args)

    def counted_evict(blocks: int) -> int:
        nonlocal evictions
        evictions += 1
        return evict(blocks)

    skip_computation(llm, monkeypatch)
    draw = random.Random(1)
    for step in range(2 * STEPS):
        if step == STEPS:
            monkeypatch.setattr(resident.rows, "put_blocks", counted_put)
            monkeypatch.setattr(engine.prefixes, "evict", counted_evict)
        if step % (NEW // REQUESTS) == 0 and engine.num_running + engine.num_waiting < REQUESTS:
            prompt = [draw.randrange(10, 200) for _ in range(draw.randrange(1, BLOCK))]
            engine.submit(prompt, greedy(NEW, ignore_eos=True))
        engine.step()
    assert engine.num_running > REQUESTS / 2
    assert evictions
    return uploads, evictions


def test_early_blocks_batch_uploads_and_evictions(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has a sequence that needs a block, and yet few steps upload block tables."""
    config = {"max_batch_size": REQUESTS, "block_size": BLOCK, "max_length": 2 * NEW}
    room = REQUESTS * (NEW + BLOCK)
    llm = small_llm(device, resident_decode=True, prompt_rows=64, kv_cache_tokens=room, **config)
    uploads, evictions = uploads_and_evictions(llm, monkeypatch)
    assert uploads < STEPS / 2
    assert evictions < STEPS / 4


def test_blocks_reserved_for_a_prompt_are_not_allocated_early(device: str) -> None:
    """An early second block of the decoding request would make the prompt wait for its end."""
    config = {"block_size": 32, "prefix_cache": False, "prefill_max_tokens": 4, "run_ahead": 0}
    engine = small_llm(
        device, resident_decode=True, prompt_rows=0, kv_cache_tokens=3 * 32, **config
    ).engine
    decoding = engine.submit([5] * 5, greedy(60, ignore_eos=True))
    while decoding.sequence.num_stored < 10:
        engine.step()
    prompt = engine.submit([6] * 64, greedy(1))
    for _ in range(18):  # after 7 the other request will soon need a block; after 22 it does
        engine.step()
    assert prompt.finish_reason
    assert not decoding.finish_reason
    assert engine.num_preemptions == 0


def test_no_block_is_early_if_residents_may_need_all_spare_ones(device: str) -> None:
    engine = small_llm(device, resident_decode=True, run_ahead=0, prefix_cache=False).engine
    requests = [engine.submit([5, at], greedy(20, ignore_eos=True)) for at in range(3)]
    engine.step()
    assert all(each.resident for each in requests)
    free = engine.sequence_runner.kv.num_free_blocks(0)
    for spare, early in ((2, 0), (3, 0), (4, free - 3)):
        step = Step(requests, max_blocks_needed=3, num_spare_blocks=spare)
        assert engine._runner._early_blocks(step, requests) == early
