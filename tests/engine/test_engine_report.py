"""Figures an engine reports to a server: blocks in use, prefix hits, room for a prompt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from roseinfer import EnginePath, RequestTooLarge
from tests.llm.served_streams import TEXTS, expected, greedy, run, serving, small_llm

if TYPE_CHECKING:
    from roseinfer import AsyncLLM
    from roseinfer.engine.engine import Update


def test_blocks_are_held_then_cached_then_evicted(device: str) -> None:
    # A sequence that decodes in a slot also holds blocks of tokens to come.
    llm = small_llm(device, block_size=16, kv_cache_tokens=160, resident_decode=False)
    engine = llm.engine
    assert engine.occupancy == (10, 0, 0)
    stream = llm.stream("x" * 40, greedy(20, ignore_eos=True))
    next(stream)
    total, in_use, cached = engine.occupancy
    assert (total, in_use, cached) == (10, 3, 0)
    list(stream)
    assert engine.occupancy == (10, 0, 4)
    llm.generate("y" * 100, greedy(40, ignore_eos=True))
    assert sum(engine.occupancy[1:]) <= 10


def test_prefix_queries_and_hits_are_counted(device: str) -> None:
    llm = small_llm(device, block_size=16)
    llm.generate(["a" * 40, "b" * 40], greedy(4))
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (80, 0)
    llm.generate("a" * 40 + "c", greedy(4))
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (121, 32)


def test_mixed_steps_decode_and_prefill(device: str) -> None:
    llm = small_llm(device)
    llm.generate(["a" * 40, "b" * 40], greedy(8))
    assert llm.engine.path_counts[EnginePath.MIXED] == 0
    stream = llm.stream("c" * 40, greedy(20, ignore_eos=True))
    next(stream)
    llm.generate("d" * 40, greedy(4))
    assert llm.engine.path_counts[EnginePath.MIXED] == 1
    assert llm.engine.path_counts[EnginePath.RECOMPUTED] == llm.engine.num_preemptions == 0


def test_prompts_admitted_out_of_order_are_counted_over_all_steps(device: str) -> None:
    """Beside each prompt of six tokens, that of two is admitted before the one of eight."""
    llm = small_llm(
        device, prefill_admission_policy="pack", prefill_max_tokens=8, chunked_prefill=False
    )
    llm.generate([[1] * tokens for tokens in (6, 8, 2, 6, 8, 2)], greedy(12, ignore_eos=True))
    assert llm.engine.path_counts[EnginePath.ADMITTED_OUT_OF_ORDER] == 2


def test_no_prefix_queries_without_a_prefix_cache(device: str) -> None:
    llm = small_llm(device, prefix_cache=False)
    llm.generate(TEXTS, greedy(4))
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (0, 0)
    assert llm.engine.occupancy[2] == 0


def test_preemptions_are_counted(device: str) -> None:
    llm = small_llm(device, block_size=4, kv_cache_tokens=96)
    llm.generate(["x" * 20, "y" * 20, "z" * 20], greedy(60, ignore_eos=True))
    assert llm.engine.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "length"), [(64, None), (4096, 100), (4096, None)])
def test_reported_token_limit_is_exact(device: str, tokens: int, length: int | None) -> None:
    llm = small_llm(device, block_size=16, kv_cache_tokens=tokens, max_length=length)
    limits = llm.engine.request_limits
    room = limits.max_new_tokens_after(20)
    assert limits.max_new_tokens_after(length or 1024) == 0
    assert room == min(tokens + 1, length or 1024) - 20
    (output,) = llm.generate("x" * 20, greedy(room, ignore_eos=True))
    assert len(output.token_ids) == room
    assert llm.engine.request_limits.max_new_tokens_after(2000) == 0
    if tokens < 1024:
        with pytest.raises(RequestTooLarge):
            list(llm.stream("x" * 20, greedy(room + 1)))


def test_stream_group_yields_what_each_request_yields_alone(device: str) -> None:
    """Requests may be added later. Pending updates are returned at once."""
    with serving(small_llm(device)) as served:

        async def read_all(served: AsyncLLM) -> dict[int, list[Update]]:
            updates_read: dict[int, list[Update]] = {at: [] for at in range(len(TEXTS))}
            group = served.stream_group()
            group.add(TEXTS[0], greedy())
            updates_read[0] += [update for _, update in await group.next()]
            for text in TEXTS[1:]:
                group.add(text, greedy())
            while any(not of or of[-1].finish_reason is None for of in updates_read.values()):
                await asyncio.sleep(0.01)
                for number, update in await group.next():
                    updates_read[number].append(update)
            group.cancel()
            return updates_read

        updates_read = run(read_all(served))
    for number, updates in updates_read.items():
        assert [each.token_id for each in updates] == expected(device, TEXTS[number])


def test_cancelling_a_stream_group_ends_its_requests(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def cancel() -> list[Update]:
            group = served.stream_group()
            for text in TEXTS:
                group.add(text, greedy(900, ignore_eos=True))
            updates_read = [update for _, update in await group.next()]
            group.cancel()
            await served.generate(TEXTS[0], greedy(3))
            return updates_read

        updates_read = run(cancel())
    assert updates_read
    assert all(update.request.finish_reason == "cancelled" for update in updates_read)
