"""Prompts that begin alike share blocks, and nobody ever reads another prefix's tokens."""

from __future__ import annotations

import pytest

from roseinfer.engine import prefix_cache
from tests.engine.prefix_cache_simulation import HASHES, REAL_HASH, Shape, World, prefix_of


@pytest.fixture
def world() -> World:
    """Blocks of 4 tokens, in one group."""
    return World(Shape())


@pytest.mark.parametrize("groups", [1, 2])
def test_a_prefix_is_shared_block_by_block(groups: int) -> None:
    world = World(Shape(groups=groups))
    first = world.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = world.start([1, 2, 3, 4, 5, 6, 7, 8, 0])
    world.check()
    assert second.stored == 8
    assert second.block_lists == [block_ids[:2] for block_ids in first.block_lists]
    third = world.start([1, 2, 3, 4, 0, 6, 7, 8, 9])
    assert third.stored == 4
    world.finish()


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
def test_a_match_leaves_a_token_to_compute(world: World, prompt: list[int], stored: int) -> None:
    world.keep(1, 2, 3, 4, 5, 6)
    assert world.hit(*prompt) == stored
    world.finish()


def test_a_prompt_shorter_than_a_block_is_kept_too(world: World) -> None:
    world.keep(7)
    assert world.hit(7, 8) == 1
    assert world.hit(8, 7) == 0


def test_the_longest_tail_is_taken(world: World) -> None:
    world.keep(1)
    world.keep(5, 6, 7)
    world.keep(1, 2, 3)
    world.keep(1, 2)
    assert world.hit(1, 2, 3, 4) == 3
    assert world.hit(1, 2, 4, 4) == 2
    world.finish()


def test_a_shared_tail_is_copied_by_whoever_goes_on_first(world: World) -> None:
    world.keep(1, 2)
    sequences = [world.start([1, 2, token, 9]) for token in (3, 4)]
    for sequence in sequences:
        assert sequence.stored == 2
        world.grow(sequence, 1)
        world.check()
    assert world.hit(1, 2, 5) == 2
    world.finish()


def test_a_tail_can_be_evicted_when_its_user_has_a_copy(world: World) -> None:
    world.keep(1, 2)
    sequence = world.start([1, 2, 3])
    world.insert(sequence)  # after a forward pass without it
    assert len(world.cache.evictable_entries) == 0
    world.grow(sequence, 1)
    assert len(world.cache.evictable_entries) == 1
    assert world.evict(1) == 1
    world.check()


def test_what_was_evicted_is_not_found_when_its_blocks_are_used_again(world: World) -> None:
    world.keep(1, 2, 3, 4, 5)
    assert world.evict(2) == 2
    again = world.run(list(range(10, 10 + 4 * world.shape.blocks)))
    assert world.free_blocks == 0
    assert world.hit(1, 2, 3, 4, 5, 6) == 0
    world.release(again)
    world.finish()


def test_hits_are_no_room_for_anything_else() -> None:
    """5 blocks could be had, 2 of them are hits: 3 can be had besides."""
    world = World(Shape(blocks=5))
    world.keep(1, 2, 3, 4, 5, 6, 7, 8)
    assert world.free_blocks + len(world.cache.evictable_entries) == 5
    sequence = world.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert world.free_blocks + len(world.cache.evictable_entries) == 3
    assert world.evict(4) == 0
    world.grow(sequence, 1)
    world.check()


def test_all_that_was_matched_is_held_to_its_last_block(world: World) -> None:
    world.keep(1, 2, 3, 4, 5, 6, 7, 8, 9)
    sequence = world.start([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert sequence.stored == 9
    assert world.evict(world.shape.blocks) == 0
    world.check()
    assert world.hit(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == 9


def test_the_cache_keeps_no_list_of_anybody_else(world: World) -> None:
    sequence = world.run([1, 2, 3, 4, 5, 6])
    tokens, block_lists = sequence.tokens, sequence.block_lists
    world.release(sequence)
    tokens[:] = [0] * 6
    block_lists[0].clear()
    block_lists.clear()
    assert world.hit(1, 2, 3, 4, 5, 6, 7) == 6
    world.finish()


def test_a_match_hands_out_lists_that_are_its_own(world: World) -> None:
    world.keep(1, 2, 3, 4, 5, 6)
    first, second = world.start([1, 2, 3, 4, 5, 6, 7]), world.start([1, 2, 3, 4, 5, 6, 8])
    world.grow(first, 1)
    assert first.block_lists[0] != second.block_lists[0]
    world.check()


def test_the_same_tokens_in_another_block(world: World) -> None:
    """The cache keeps the first block, each sequence its own, and neither minds the other."""
    first, second = world.start([1, 2, 3, 4, 5]), world.start([1, 2, 3, 4, 5])
    for sequence in (first, second):
        world.grow(sequence, 5)
        world.check()
    cached, own = first.block_lists[0][0], second.block_lists[0][0]
    assert [world.kv.refcount(each) for each in (cached, own)] == [2, 1]
    world.release(first)
    assert [world.kv.refcount(each) for each in (cached, own)] == [1, 1]
    assert world.evict(2) == 2
    assert [world.kv.refcount(each) for each in (cached, own)] == [0, 1]
    world.check()
    world.finish()


def test_further_blocks_go_under_a_block_that_another_sequence_brought(world: World) -> None:
    first, second = world.start([1, 2, 3, 4, 5]), world.start([1, 2, 3, 4, 6, 7, 8, 9, 10])
    world.grow(first, 5)
    world.grow(second, 9)
    assert world.hit(1, 2, 3, 4, 6, 7, 8, 9, 10) == 8
    world.check()
    world.release(first)
    world.release(second)
    world.evict(1)
    assert world.hit(1, 2, 3, 4, 6, 7, 8, 9, 10, 11) == 9, "the end that was kept first goes first"
    world.finish()


def test_a_block_in_use_outlives_the_one_above_it(world: World) -> None:
    first, second = world.start([1, 2, 3, 4]), world.start([1, 2, 3, 4, 5, 6, 7, 8])
    world.grow(first, 4)
    world.grow(second, 8)
    world.release(first)
    assert len(world.cache.evictable_entries) == 1
    assert world.evict(1) == 1
    world.check()
    assert not world.entries, "nothing can be found behind a block that cannot"
    second.tokens += [9, 10, 11, 12]
    world.grow(second, 4)
    world.check()
    assert world.hit(1, 2, 3, 4, 5) == 0
    world.finish()


def test_only_what_was_stored_is_kept(world: World) -> None:
    """A prefill that is cancelled has room for the whole prompt, and part of it written."""
    sequence = world.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    world.grow(sequence, 5)
    world.plan(sequence, 4, write=False)
    world.release(sequence)
    world.check()
    assert world.hit(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == 4
    world.finish()


def test_what_the_last_forward_pass_filled_is_kept(world: World) -> None:
    sequence = world.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    world.plan(sequence, 9)
    sequence.stored = 9
    world.release(sequence)
    assert world.hit(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == 9
    world.finish()


def test_a_sequence_that_resumes_has_what_is_still_cached(world: World) -> None:
    world.keep(1, 2, 3, 4, 5, 6, 7, 8, 9)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    for stored in (9, 8, 4, 0):
        assert world.hit(*prompt) == stored
        world.evict(1)
    again = world.run(prompt)
    world.check()
    assert again.stored == len(prompt)


def test_one_hash_for_all_prefixes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "chain_hash", HASHES["constant"])
    world.keep(1, 2, 3, 4, 5)
    world.keep(5, 6, 7, 8, 9, 9, 9, 9)
    assert world.hit(5, 6, 7, 8, 9) == 0, "the older entry stays"
    assert world.hit(1, 2, 3, 4, 5, 6) == 5
    assert world.hit(6, 0) == 0
    world.finish()


def test_the_same_block_behind_another_prefix_of_the_same_hash(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_last_block(_: int, link: int | tuple[int, ...]) -> int:
        return hash(link)

    monkeypatch.setattr(prefix_cache, "chain_hash", by_last_block)
    world.keep(1, 1, 1, 1, 5, 5, 5, 5, 3)
    world.keep(2, 2, 2, 2)
    assert world.hit(2, 2, 2, 2, 5, 5, 5, 5, 0) == 4
    assert world.hit(2, 2, 2, 2, 3, 0) == 4
    assert world.hit(1, 1, 1, 1, 5, 5, 5, 5, 3, 0) == 9


def test_tails_and_full_blocks_have_keys_of_their_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "chain_hash", HASHES["constant"])
    for length in (1, 2, 3, 4):
        world.keep(*range(length))
        world.check()
    assert len(world.entries) == 4
    assert [world.hit(*range(length + 1)) for length in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_a_full_block_is_never_kept_as_a_tail(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same_for_blocks(before: int, link: int | tuple[int, ...]) -> int:
        return 0 if isinstance(link, tuple) else REAL_HASH(before, link)

    monkeypatch.setattr(prefix_cache, "chain_hash", same_for_blocks)
    world.keep(1, 2, 3, 4)
    world.keep(5, 6, 7, 8)
    assert [prefix_of(entry) for entry in world.entries] == [(1, 2, 3, 4)]


def test_the_least_recently_used_go_first_and_ends_before_beginnings(world: World) -> None:
    world.keep(1, 1, 1, 1, 1)
    world.keep(2, 2, 2, 2, 2)
    world.hit(1, 1, 1, 1, 1, 1)
    gone = []
    while len(world.cache.evictable_entries):
        before = set(world.entries)
        world.evict(1)
        gone += [prefix_of(entry) for entry in before - set(world.entries)]
    assert gone == [(2,) * 5, (2,) * 4, (1,) * 5, (1,) * 4]
    assert world.cache.num_evictions == 4


def test_what_is_forgotten_is_not_found(world: World) -> None:
    world.keep(1, 2, 3, 4)
    sequence = world.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9])
    follower = world.start([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])
    world.grow(follower, 4)
    world.forget(sequence)
    world.check()
    assert world.hit(1, 2, 3, 4, 5, 6, 7, 8, 9) == 4, "somebody else's stays"
    assert world.hit(1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0) == 4, "what followed it does not"
    world.finish()


def test_a_sequence_ends_once(world: World) -> None:
    """Whoever ends it again, in either way, changes nothing and keeps nothing."""
    kept, forgotten = world.run([1, 2, 3, 4, 5]), world.run([6, 6])
    world.cache.release(kept.held, kept.session)
    world.cache.release_and_invalidate(forgotten.held)
    for sequence in (kept, forgotten):
        world.insert(sequence)
        world.cache.release_and_invalidate(sequence.held)
        world.release(sequence)
        world.check()
    assert world.hit(1, 2, 3, 4, 5, 6) == 5
    assert world.hit(6, 6, 6) == 0
    world.finish()


def test_a_tail_taken_out_is_not_kept_again_while_others_hold_its_block(world: World) -> None:
    world.keep(1, 2)
    first, second = world.start([1, 2, 3]), world.start([1, 2, 4])
    assert first.block_lists == second.block_lists
    world.cache.clear()
    world.release(first)  # it has stored nothing of its own
    world.check()
    assert len(world.cache.evictable_entries) == 0, "evicting it would free nothing"
    world.release(second)
    world.check()
    assert world.free_blocks == world.shape.blocks


def test_clear_leaves_sequences_their_blocks(world: World) -> None:
    world.keep(1, 2, 3, 4, 5)
    sequence = world.start([1, 2, 3, 4, 5, 6])
    world.keep(7, 7)
    world.cache.clear()
    world.poison()
    world.check()
    assert not world.entries
    assert world.free_blocks == world.shape.blocks - 2
    world.grow(sequence, 1)
    world.finish()


def test_evictions_are_counted(world: World) -> None:
    world.keep(1, 2, 3, 4, 5, 6)
    world.evict(1)
    world.cache.clear()
    assert world.cache.num_evictions == 1
