"""What an engine says of itself to a server: blocks in use, prefixes found, room for a prompt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from roseinfer import RequestTooLarge
from tests.llm.served_streams import TEXTS, expected, greedy, run, serving, small_llm

if TYPE_CHECKING:
    from roseinfer import AsyncLLM
    from roseinfer.engine.engine import Update


def test_blocks_are_held_then_cached_then_given_away(device: str) -> None:
    # What decodes in a slot holds blocks of tokens to come, too.
    llm = small_llm(device, block_size=16, kv_cache_tokens=160, resident_decode=False)
    engine = llm.engine
    assert engine.occupancy == (10, 0, 0)
    stream = llm.stream("x" * 40, greedy(20, ignore_eos=True))
    next(stream)
    total, held, cached = engine.occupancy
    assert (total, held, cached) == (10, 3, 0)
    list(stream)
    assert engine.occupancy == (10, 0, 4)
    llm.generate("y" * 100, greedy(40, ignore_eos=True))
    assert sum(engine.occupancy[1:]) <= 10


def test_prompt_tokens_are_counted_once_and_those_found_beside_them(device: str) -> None:
    llm = small_llm(device, block_size=16)
    llm.generate(["a" * 40, "b" * 40], greedy(4))
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (80, 0)
    llm.generate("a" * 40 + "c", greedy(4))
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (121, 32)


def test_without_a_prefix_cache_nothing_is_asked_of_it(device: str) -> None:
    llm = small_llm(device, prefix_cache=False)
    llm.generate(TEXTS, greedy(4))
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (0, 0)
    assert llm.engine.occupancy[2] == 0


def test_preemptions_are_counted(device: str) -> None:
    llm = small_llm(device, block_size=4, kv_cache_tokens=96)
    llm.generate(["x" * 20, "y" * 20, "z" * 20], greedy(60, ignore_eos=True))
    assert llm.engine.num_preemptions > 0


@pytest.mark.parametrize(("tokens", "length"), [(64, None), (4096, 100), (4096, None)])
def test_a_prompt_has_the_room_that_is_said_and_no_more(
    device: str, tokens: int, length: int | None
) -> None:
    llm = small_llm(device, block_size=16, kv_cache_tokens=tokens, max_length=length)
    room = llm.engine.request_limits.max_new_tokens_after(20)
    assert room == min(tokens + 1, length or 1024) - 20
    (output,) = llm.generate("x" * 20, greedy(room, ignore_eos=True))
    assert len(output.token_ids) == room
    assert llm.engine.request_limits.max_new_tokens_after(2000) == 0
    if tokens < 1024:
        with pytest.raises(RequestTooLarge):
            list(llm.stream("x" * 20, greedy(room + 1)))


def test_prompts_together_bring_what_each_brings_alone(device: str) -> None:
    """Some are added later. What came meanwhile is returned at once."""
    with serving(small_llm(device)) as served:

        async def listen(served: AsyncLLM) -> dict[int, list[Update]]:
            found: dict[int, list[Update]] = {at: [] for at in range(len(TEXTS))}
            together = served.stream_group()
            together.add(TEXTS[0], greedy())
            found[0] += [update for _, update in await together.next()]
            for text in TEXTS[1:]:
                together.add(text, greedy())
            while any(not of or of[-1].finish_reason is None for of in found.values()):
                await asyncio.sleep(0.01)
                for number, update in await together.next():
                    found[number].append(update)
            together.cancel()
            return found

        found = run(listen(served))
    for number, updates in found.items():
        assert [each.token_id for each in updates] == expected(device, TEXTS[number])


def test_leaving_ends_them_all(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def cancel() -> list[Update]:
            together = served.stream_group()
            for text in TEXTS:
                together.add(text, greedy(900, ignore_eos=True))
            found = [update for _, update in await together.next()]
            together.cancel()
            await served.generate(TEXTS[0], greedy(3))
            return found

        found = run(cancel())
    assert found
    assert all(update.request.finish_reason == "cancelled" for update in found)
