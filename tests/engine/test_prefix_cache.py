"""Prefix cache: prompts with equal prefixes share blocks, and never those of another prefix."""

from __future__ import annotations

import pytest

from roseinfer.engine import prefix_cache
from roseinfer.engine.request import RequestBlockAllocator
from tests.engine.prefix_cache_simulation import (
    HASHES,
    REAL_HASH,
    PrefixCacheSimulation,
    Shape,
    prefix_of,
)


@pytest.fixture
def simulation() -> PrefixCacheSimulation:
    """Blocks of 4 tokens, in one group."""
    return PrefixCacheSimulation(Shape())


@pytest.mark.parametrize("groups", [1, 2])
def test_prefix_is_shared_block_by_block(groups: int) -> None:
    simulation = PrefixCacheSimulation(Shape(groups=groups))
    first = simulation.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = simulation.start([1, 2, 3, 4, 5, 6, 7, 8, 0])
    simulation.check()
    assert second.stored == 8
    assert second.block_lists == [block_ids[:2] for block_ids in first.block_lists]
    third = simulation.start([1, 2, 3, 4, 0, 6, 7, 8, 9])
    assert third.stored == 4
    simulation.finish()


@pytest.mark.parametrize(
    ("prompt", "stored"),
    [
        ([], 0),
        ([1], 0),
        ([1, 2, 3], 0),
        ([1, 2, 3, 4], 0),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5, 6, 7], 6),
        ([1, 2, 3, 4, 5, 6, 0, 0, 0], 6),
        ([1, 2, 3, 4, 0], 4),
        ([2, 2, 3, 4, 5, 6, 7], 0),
    ],
    ids=str,
)
def test_match_leaves_one_token_to_compute(
    simulation: PrefixCacheSimulation, prompt: list[int], stored: int
) -> None:
    simulation.keep(1, 2, 3, 4, 5, 6)
    assert simulation.hit(*prompt) == stored
    simulation.finish()


def test_prompt_shorter_than_a_block_is_cached(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(7)
    assert simulation.hit(7, 8) == 1
    assert simulation.hit(8, 7) == 0


def test_longest_tail_is_matched(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1)
    simulation.keep(5, 6, 7)
    simulation.keep(1, 2, 3)
    simulation.keep(1, 2)
    assert simulation.hit(1, 2, 3, 4) == 3
    assert simulation.hit(1, 2, 4, 4) == 2
    simulation.finish()


def test_shared_tail_is_copied_on_write(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2)
    sequences = [simulation.start([1, 2, token, 9]) for token in (3, 4)]
    for sequence in sequences:
        assert sequence.stored == 2
        simulation.grow(sequence, 1)
        simulation.check()
    assert simulation.hit(1, 2, 5) == 2
    simulation.finish()


def test_tail_is_evictable_once_its_user_has_a_copy(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2)
    sequence = simulation.start([1, 2, 3])
    simulation.insert(sequence)  # after a forward pass without it
    assert len(simulation.cache.evictable_entries) == 0
    simulation.grow(sequence, 1)
    assert len(simulation.cache.evictable_entries) == 1
    assert simulation.evict(1) == 1
    simulation.check()


def test_evicted_prefix_is_not_found_after_its_blocks_are_reused(
    simulation: PrefixCacheSimulation,
) -> None:
    simulation.keep(1, 2, 3, 4, 5)
    assert simulation.evict(2) == 2
    again = simulation.run(list(range(10, 10 + 4 * simulation.shape.blocks)))
    assert simulation.free_blocks == 0
    assert simulation.hit(1, 2, 3, 4, 5, 6) == 0
    simulation.release(again)
    simulation.finish()


def test_hit_blocks_are_not_evictable() -> None:
    """Of 5 available blocks 2 are hits, so 3 remain."""
    simulation = PrefixCacheSimulation(Shape(blocks=5))
    simulation.keep(1, 2, 3, 4, 5, 6, 7, 8)
    assert simulation.free_blocks + len(simulation.cache.evictable_entries) == 5
    sequence = simulation.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert simulation.free_blocks + len(simulation.cache.evictable_entries) == 3
    assert simulation.evict(4) == 0
    simulation.grow(sequence, 1)
    simulation.check()


def test_matched_blocks_are_held(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2, 3, 4, 5, 6, 7, 8, 9)
    sequence = simulation.start([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert sequence.stored == 9
    assert simulation.evict(simulation.shape.blocks) == 0
    simulation.check()
    assert simulation.hit(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == 9


def test_cache_references_no_list_of_a_sequence(simulation: PrefixCacheSimulation) -> None:
    sequence = simulation.run([1, 2, 3, 4, 5, 6])
    tokens, block_lists = sequence.tokens, sequence.block_lists
    simulation.release(sequence)
    tokens[:] = [0] * 6
    block_lists[0].clear()
    block_lists.clear()
    assert simulation.hit(1, 2, 3, 4, 5, 6, 7) == 6
    simulation.finish()


def test_match_returns_new_lists(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2, 3, 4, 5, 6)
    first, second = simulation.start([1, 2, 3, 4, 5, 6, 7]), simulation.start([1, 2, 3, 4, 5, 6, 8])
    simulation.grow(first, 1)
    assert first.block_lists[0] != second.block_lists[0]
    simulation.check()


def test_equal_tokens_in_another_block_are_independent(simulation: PrefixCacheSimulation) -> None:
    """The cache holds the first block and each sequence its own, independently."""
    first, second = simulation.start([1, 2, 3, 4, 5]), simulation.start([1, 2, 3, 4, 5])
    for sequence in (first, second):
        simulation.grow(sequence, 5)
        simulation.check()
    cached, private = first.block_lists[0][0], second.block_lists[0][0]
    assert [simulation.kv.refcount(each) for each in (cached, private)] == [2, 1]
    simulation.release(first)
    assert [simulation.kv.refcount(each) for each in (cached, private)] == [1, 1]
    assert simulation.evict(2) == 2
    assert [simulation.kv.refcount(each) for each in (cached, private)] == [0, 1]
    simulation.check()
    simulation.finish()


def test_blocks_are_inserted_below_a_block_of_another_sequence(
    simulation: PrefixCacheSimulation,
) -> None:
    first, second = (
        simulation.start([1, 2, 3, 4, 5]),
        simulation.start([1, 2, 3, 4, 6, 7, 8, 9, 10]),
    )
    simulation.grow(first, 5)
    simulation.grow(second, 9)
    assert simulation.hit(1, 2, 3, 4, 6, 7, 8, 9, 10) == 8
    simulation.check()
    simulation.release(first)
    simulation.release(second)
    simulation.evict(1)
    assert simulation.hit(1, 2, 3, 4, 6, 7, 8, 9, 10, 11) == 9, (
        "expected the older tail to be evicted"
    )
    simulation.finish()


def test_block_that_is_computed_again_is_evicted_last(simulation: PrefixCacheSimulation) -> None:
    first, second = (
        simulation.start([1, 2, 3, 4, 5]),
        simulation.start([1, 2, 3, 4, 6, 7, 8, 9, 10]),
    )
    simulation.grow(first, 5)
    simulation.release(first)
    simulation.keep(2, 2, 2, 2, 2)
    simulation.grow(second, 9)
    simulation.evict(2)
    assert simulation.hit(1, 2, 3, 4, 6, 7, 8, 9, 10) == 8
    simulation.release(second)
    simulation.finish()


def test_block_in_use_outlives_its_evicted_parent(simulation: PrefixCacheSimulation) -> None:
    first, second = simulation.start([1, 2, 3, 4]), simulation.start([1, 2, 3, 4, 5, 6, 7, 8])
    simulation.grow(first, 4)
    simulation.grow(second, 8)
    simulation.release(first)
    assert len(simulation.cache.evictable_entries) == 1
    assert simulation.evict(1) == 1
    simulation.check()
    assert not simulation.entries, "a block below an evicted one can be found"
    second.tokens += [9, 10, 11, 12]
    simulation.grow(second, 4)
    simulation.check()
    assert simulation.hit(1, 2, 3, 4, 5) == 0
    simulation.finish()


def test_only_stored_tokens_are_cached(simulation: PrefixCacheSimulation) -> None:
    """A cancelled prefill has blocks for its whole prompt, and has written a part of it."""
    sequence = simulation.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    simulation.grow(sequence, 5)
    simulation.plan(sequence, 4, write=False)
    simulation.truncate(sequence)
    simulation.release(sequence)
    simulation.check()
    assert simulation.hit(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == 5
    simulation.finish()


def test_blocks_of_the_last_forward_pass_are_cached(simulation: PrefixCacheSimulation) -> None:
    sequence = simulation.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    simulation.plan(sequence, 9)
    sequence.stored = 9
    simulation.release(sequence)
    assert simulation.hit(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == 9
    simulation.finish()


def test_resumed_sequence_reuses_blocks_still_cached(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2, 3, 4, 5, 6, 7, 8, 9)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    for stored in (9, 8, 4, 0):
        assert simulation.hit(*prompt) == stored
        simulation.evict(1)
    again = simulation.run(prompt)
    simulation.check()
    assert again.stored == len(prompt)


def test_constant_hash_causes_no_wrong_hits(
    simulation: PrefixCacheSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "chain_hash", HASHES["constant"])
    simulation.keep(1, 2, 3, 4, 5)
    simulation.keep(5, 6, 7, 8, 9, 9, 9, 9)
    assert simulation.hit(5, 6, 7, 8, 9) == 0, "expected the older entry to stay"
    assert simulation.hit(1, 2, 3, 4, 5, 6) == 5
    assert simulation.hit(6, 0) == 0
    simulation.finish()


def test_equal_block_after_another_prefix_with_equal_hash_is_not_hit(
    simulation: PrefixCacheSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_last_block(_: int, link: int | tuple[int, ...]) -> int:
        return hash(link)

    monkeypatch.setattr(prefix_cache, "chain_hash", by_last_block)
    simulation.keep(1, 1, 1, 1, 5, 5, 5, 5, 3)
    simulation.keep(2, 2, 2, 2)
    assert simulation.hit(2, 2, 2, 2, 5, 5, 5, 5, 0) == 4
    assert simulation.hit(2, 2, 2, 2, 3, 0) == 4
    assert simulation.hit(1, 1, 1, 1, 5, 5, 5, 5, 3, 0) == 9


def test_tails_and_full_blocks_have_distinct_keys(
    simulation: PrefixCacheSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "chain_hash", HASHES["constant"])
    for length in (1, 2, 3, 4):
        simulation.keep(*range(length))
        simulation.check()
    assert len(simulation.entries) == 4
    assert [simulation.hit(*range(length + 1)) for length in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_full_block_is_never_cached_as_a_tail(
    simulation: PrefixCacheSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same_for_blocks(before: int, link: int | tuple[int, ...]) -> int:
        return 0 if isinstance(link, tuple) else REAL_HASH(before, link)

    monkeypatch.setattr(prefix_cache, "chain_hash", same_for_blocks)
    simulation.keep(1, 2, 3, 4)
    simulation.keep(5, 6, 7, 8)
    assert [prefix_of(entry) for entry in simulation.entries] == [(1, 2, 3, 4)]


def test_eviction_is_least_recently_used_and_leaves_first(
    simulation: PrefixCacheSimulation,
) -> None:
    simulation.keep(1, 1, 1, 1, 1)
    simulation.keep(2, 2, 2, 2, 2)
    simulation.hit(1, 1, 1, 1, 1, 1)
    evicted = []
    while len(simulation.cache.evictable_entries):
        before = set(simulation.entries)
        simulation.evict(1)
        evicted += [prefix_of(entry) for entry in before - set(simulation.entries)]
    assert evicted == [(2,) * 5, (2,) * 4, (1,) * 5, (1,) * 4]
    assert simulation.cache.num_evictions == 4


@pytest.mark.parametrize(("num_cached", "num_evicted"), [(17, 1), (31, 1), (40, 2)])
def test_a_sixteenth_of_the_blocks_is_evicted_at_once(num_cached: int, num_evicted: int) -> None:
    simulation = PrefixCacheSimulation(Shape(block_size=1, blocks=num_cached))
    for token in range(num_cached):
        simulation.keep(token)
    allocator = RequestBlockAllocator(simulation.kv, simulation.cache, lambda _: None)
    allocator.ensure(1)
    assert simulation.free_blocks == num_evicted
    simulation.finish()


def test_invalidated_blocks_are_not_found(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2, 3, 4)
    sequence = simulation.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9])
    follower = simulation.start([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])
    simulation.grow(follower, 4)
    simulation.forget(sequence)
    simulation.check()
    assert simulation.hit(1, 2, 3, 4, 5, 6, 7, 8, 9) == 4, (
        "expected another sequence's block to stay"
    )
    assert simulation.hit(1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0) == 4, "expected its children to go"
    simulation.finish()


def test_ending_a_sequence_twice_changes_nothing(simulation: PrefixCacheSimulation) -> None:
    """Ending it again, in either way, changes nothing and stores nothing."""
    released, forgotten = simulation.run([1, 2, 3, 4, 5]), simulation.run([6, 6])
    simulation.cache.release(released.held_prefix, released.session)
    simulation.cache.release_and_invalidate(forgotten.held_prefix)
    for sequence in (released, forgotten):
        simulation.insert(sequence)
        simulation.cache.release_and_invalidate(sequence.held_prefix)
        simulation.release(sequence)
        simulation.check()
    assert simulation.hit(1, 2, 3, 4, 5, 6) == 5
    assert simulation.hit(6, 6, 6) == 0
    simulation.finish()


def test_removed_tail_is_not_cached_again_while_its_block_is_held(
    simulation: PrefixCacheSimulation,
) -> None:
    simulation.keep(1, 2)
    first, second = simulation.start([1, 2, 3]), simulation.start([1, 2, 4])
    assert first.block_lists == second.block_lists
    simulation.cache.clear()
    simulation.release(first)  # it has stored nothing of its own
    simulation.check()
    assert len(simulation.cache.evictable_entries) == 0, "evicting it would free nothing"
    simulation.release(second)
    simulation.check()
    assert simulation.free_blocks == simulation.shape.blocks


def test_clear_keeps_blocks_of_sequences(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2, 3, 4, 5)
    sequence = simulation.start([1, 2, 3, 4, 5, 6])
    simulation.keep(7, 7)
    simulation.cache.clear()
    simulation.poison()
    simulation.check()
    assert not simulation.entries
    assert simulation.free_blocks == simulation.shape.blocks - 2
    simulation.grow(sequence, 1)
    simulation.finish()


@pytest.mark.parametrize("stored", [3, 4, 6])
def test_blocks_of_running_sequences_are_not_cached_after_a_reset(
    simulation: PrefixCacheSimulation, stored: int
) -> None:
    sequence = simulation.start([*range(9)])
    simulation.grow(sequence, stored)
    simulation.cache.reset()
    simulation.grow(sequence, 9 - stored)
    simulation.release(sequence)
    simulation.check()
    assert not simulation.entries
    simulation.keep(*range(9))
    assert simulation.hit(*range(9)) == 8
    simulation.finish()


def test_evictions_are_counted(simulation: PrefixCacheSimulation) -> None:
    simulation.keep(1, 2, 3, 4, 5, 6)
    simulation.evict(1)
    simulation.cache.clear()
    assert simulation.cache.num_evictions == 1
