"""Blocks are given out before they are needed, to several sequences at a time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.engine.continuations import greedy, small_llm

if TYPE_CHECKING:
    import pytest

    from roseinfer import LLM

TEXTS, BLOCK, NEW, STEPS = 64, 64, 256, 400


class Token:
    """Comes of a step that computes nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def wait(self) -> list[int]:
        return [97] * self.count


def computes_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine._runner
    assert runner._resident is not None
    assert runner._prompt_rows is not None
    for steps in (runner._resident.steps, runner._prompt_rows._rows._steps):
        monkeypatch.setattr(steps, "run", lambda *_: None)
        monkeypatch.setattr(steps, "read_back", Token)


def uploads_and_evictions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Serve texts that began one after the other, until all that was free is cached or in use.

    This returns how often steps from then on told the device of blocks, and made prefixes give way.
    """
    engine = llm.engine
    resident = engine._runner._resident
    assert resident is not None
    assert engine.prefixes is not None
    uploads = evictions = 0
    put, evict = resident.rows.put_blocks, engine.prefixes.evict

    def counted(*args: Any) -> None:
        nonlocal uploads
        uploads += 1
        put(*args)

    def evicted(blocks: int) -> int:
        nonlocal evictions
        evictions += 1
        return evict(blocks)

    computes_nothing(llm, monkeypatch)
    draw = random.Random(1)
    for step in range(2 * STEPS):
        if step == STEPS:
            monkeypatch.setattr(resident.rows, "put_blocks", counted)
            monkeypatch.setattr(engine.prefixes, "evict", evicted)
        if step % (NEW // TEXTS) == 0 and engine.num_running + engine.num_waiting < TEXTS:
            prompt = [draw.randrange(10, 200) for _ in range(draw.randrange(1, BLOCK))]
            engine.submit(prompt, greedy(NEW, ignore_eos=True))
        engine.step()
    assert engine.num_running > TEXTS / 2
    assert evictions
    return uploads, evictions


def test_sequences_wait_for_each_other(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step one of them needs a block, and yet few steps have blocks to tell of."""
    config = {"max_batch_size": TEXTS, "block_size": BLOCK, "max_length": 2 * NEW}
    room = TEXTS * (NEW + BLOCK)
    llm = small_llm(device, resident_decode=True, prompt_rows=64, kv_cache_tokens=room, **config)
    uploads, evictions = uploads_and_evictions(llm, monkeypatch)
    assert uploads < STEPS / 2
    assert evictions < STEPS / 4


def test_blocks_of_a_prompt_that_is_being_stored_are_not_given_early(device: str) -> None:
    """The one that decodes would have its second block, and the prompt would wait for its end."""
    config = {"block_size": 32, "prefix_cache": False, "prefill_max_tokens": 4, "run_ahead": 0}
    engine = small_llm(
        device, resident_decode=True, prompt_rows=0, kv_cache_tokens=3 * 32, **config
    ).engine
    decoding = engine.submit([5] * 5, greedy(60, ignore_eos=True))
    while decoding.sequence.num_stored < 10:
        engine.step()
    prompt = engine.submit([6] * 64, greedy(1))
    for _ in range(18):  # after seven, the other one will soon need a block, and after 22 it does
        engine.step()
    assert prompt.finish_reason
    assert not decoding.finish_reason
    assert engine.num_preemptions == 0
