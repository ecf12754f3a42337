"""Prompts that begin alike share blocks, and nobody ever reads another prefix's tokens.

What is written for a token is a number that stands for the token and all before it, so a
block that belongs behind another prefix shows whichever way it was reached.
"""

from __future__ import annotations

import sys
from collections import Counter, abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer import prefix_cache
from roseinfer.config import AppendPolicy
from roseinfer.kv.manager import KVBlockManager
from roseinfer.prefix_cache import Entry, Held, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS = 2
REAL_HASH = prefix_cache.chain_hash


@dataclass(frozen=True)
class Shape:
    block_size: int = 4
    groups: int = 1
    blocks: int = 20

    @property
    def layers_per_group(self) -> int:
        return LAYERS // self.groups


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    block_lists: list[list[int]]
    stored: int
    held: Held


class World:
    """A cache of blocks, a prefix cache on it, and the sequences that use both."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.kv = KVBlockManager(
            LAYERS,
            1,
            1,
            shape.block_size,
            shape.blocks + 1,
            "cpu",
            torch.float32,
            AppendPolicy(triton=False),
            layers_per_group=shape.layers_per_group,
        )
        self.cache = PrefixCache(self.kv)
        self.sequences: list[Sequence] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    # ------------------------------------------------------------------------------- steps

    def start(self, tokens: list[int]) -> Sequence:
        match = self.cache.match(tokens)
        sequence = Sequence(list(tokens), match.block_lists, match.num_tokens, match.held)
        self.sequences.append(sequence)
        return sequence

    def plan(self, sequence: Sequence, num_tokens: int, *, write: bool = True) -> None:
        """Room for tokens, and their keys and values, but nothing that counts them as stored."""
        start, size = sequence.stored, self.shape.layers_per_group
        new = self.coded(sequence.tokens[: start + num_tokens])[start:]
        for group, block_ids in enumerate(sequence.block_lists):
            plan = self.kv.plan_append(group * size, [block_ids], [num_tokens])
            for layer in range(group * size, (group + 1) * size):
                if write:
                    self.kv.write(plan, layer, new[:, None, None] + layer, -new[:, None, None])

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """One forward pass, and blocks that become full are registered."""
        self.plan(sequence, num_tokens)
        sequence.stored += num_tokens
        self.insert(sequence)

    def insert(self, sequence: Sequence) -> None:
        self.cache.insert(sequence.held, sequence.tokens, sequence.block_lists, sequence.stored)

    def run(self, tokens: list[int]) -> Sequence:
        """A sequence that has stored all its tokens."""
        sequence = self.start(tokens)
        self.grow(sequence, len(tokens) - sequence.stored)
        return sequence

    def release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.held, sequence.tokens, sequence.block_lists, sequence.stored)
        self.free(sequence)

    def forget(self, sequence: Sequence) -> None:
        self.cache.forget(sequence.held)
        self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        for group, block_ids in enumerate(sequence.block_lists):
            self.kv.free_blocks(group * self.shape.layers_per_group, block_ids)
        self.sequences.remove(sequence)
        self.poison()

    def evict(self, blocks: int) -> int:
        evictable, free = self.cache.num_evictable, self.free_blocks
        freed = self.cache.evict(blocks)
        assert self.free_blocks == free + freed
        assert freed == min(blocks, evictable)
        self.poison()
        return freed

    def keep(self, *tokens: int) -> None:
        """Store these, and release them."""
        self.release(self.run(list(tokens)))

    # -------------------------------------------------------------------------- looking on

    @property
    def free_blocks(self) -> int:
        (free,) = {self.kv.num_free_blocks(layer) for layer in range(LAYERS)}
        return free

    @property
    def entries(self) -> list[Entry]:
        return list(self.cache._entries.values())

    def hit(self, *tokens: int) -> int:
        """How many tokens a prompt would find. The sequence never runs."""
        sequence = self.start(list(tokens))
        self.check()
        self.release(sequence)
        return sequence.stored

    def coded(self, tokens: list[int] | tuple[int, ...]) -> torch.Tensor:
        prefixes = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
        numbers = [self._numbers.setdefault(each, 10 + len(self._numbers)) for each in prefixes]
        return torch.tensor(numbers, dtype=torch.float32)

    def poison(self) -> None:
        """Nobody may read what lies in free blocks."""
        for group in range(self.shape.groups):
            layers = slice(
                group * self.shape.layers_per_group, (group + 1) * self.shape.layers_per_group
            )
            free = [index for index, holders in self.refcounts(group).items() if not holders]
            self.kv.keys[layers, free] = self.kv.values[layers, free] = float("nan")

    def refcounts(self, group: int) -> dict[int, int]:
        first = group * (self.shape.blocks + 1)
        return {at: self.kv.refcount(first + at) for at in range(1, self.shape.blocks + 1)}

    # ------------------------------------------------------------------------- invariants

    def check(self) -> None:
        self._check_contents()
        self._check_counts()
        self._check_order()
        self._check_structure()

    def _check_contents(self) -> None:
        for sequence in self.sequences:
            self._check_stored(sequence.block_lists, sequence.tokens[: sequence.stored])
        for entry in self.entries:
            chain = list(up_from(entry))[::-1]
            lists = [
                [each.block_ids[group] for each in chain] for group in range(self.shape.groups)
            ]
            self._check_stored(lists, [token for each in chain for token in each.tokens])

    def _check_stored(self, block_lists: list[list[int]], tokens: list[int]) -> None:
        want = self.coded(tokens)
        for layer in range(LAYERS):
            block_ids = block_lists[layer // self.shape.layers_per_group]
            key, value = self.kv.gather_sequence(layer, block_ids)
            assert torch.equal(key.flatten(), want + layer)
            assert torch.equal(value.flatten(), -want)

    def _check_counts(self) -> None:
        """Every reference is somebody's: a sequence's list's or the cache's."""
        holders = Counter(
            block_id
            for sequence in self.sequences
            for block_ids in sequence.block_lists
            for block_id in block_ids
        )
        holders.update(block_id for entry in self.entries for block_id in entry.block_ids)
        for group in range(self.shape.groups):
            first = group * (self.shape.blocks + 1)
            counts = self.refcounts(group)
            assert counts == {at: holders[first + at] for at in counts}
            assert self.free_blocks == sum(not holders for holders in counts.values())
        users = Counter(
            entry
            for sequence in self.sequences
            for entry in (
                *sequence.held.matched,
                *sequence.held.inserted,
                *([sequence.held.tail] if sequence.held.tail else []),
            )
        )
        for entry in self.entries:
            assert entry.users == users[entry]
            for block_id in entry.block_ids:
                assert self.kv.refcount(block_id) == entry.users + 1
                assert self.kv.block_info(block_id).length == len(entry.tokens)
        unused = [entry for entry in self.entries if not entry.users]
        assert set(self.cache._unused) == set(unused)
        assert self.cache.num_evictable == len(unused)

    def _check_order(self) -> None:
        """Nothing goes before what is unused below it."""
        order = list(self.cache._unused)
        for at, entry in enumerate(order):
            assert not set(order[:at]) & set(up_from(entry))

    def _check_structure(self) -> None:
        entries = self.entries
        below: list[Entry] = [self.cache._root]
        for entry in below:
            below += entry.children
        assert set(below[1:]) == set(entries)
        assert len(below) - 1 == len(entries) <= self.shape.blocks
        for key, entry in self.cache._entries.items():
            assert entry.cached
            assert entry.key == key
            assert entry.parent is not None
            assert entry.end == entry.parent.end + len(entry.tokens)
            assert not entry.parent.end % self.shape.block_size
            assert 0 < len(entry.tokens) <= self.shape.block_size

    def finish(self) -> None:
        """All sequences end, and nothing of them is left."""
        for sequence in list(self.sequences):
            self.release(sequence)
            self.check()
        assert self.cache.num_evictable == len(self.entries)
        self.cache.clear()
        self.check()
        assert self.cache.num_evictable == 0
        assert not self.entries
        assert not self.cache._root.children
        assert self.free_blocks == self.shape.blocks


def up_from(entry: Entry) -> Iterator[Entry]:
    at: Entry | None = entry
    while at is not None and at.parent is not None:
        yield at
        at = at.parent


def prefix_of(entry: Entry) -> tuple[int, ...]:
    return tuple(token for each in list(up_from(entry))[::-1] for token in each.tokens)


# ------------------------------------------------------------------------------------- histories


@dataclass(eq=False)
class Known:
    """What the naive model keeps for a block: the prefix that ends in it, and who uses it."""

    prefix: tuple[int, ...]
    users: set[Sequence]


@dataclass(eq=False)
class Trail:
    """Where a sequence stands in the naive model: the blocks it passed, its own or not."""

    passed: list[Known]
    tail: Known | None
    own: list[Known] = field(default_factory=list)


@dataclass
class Naive:
    """The prefixes that can be found, and in which order they go. Knows no hash and no block."""

    block_size: int
    known: dict[tuple[int, ...], Known] = field(default_factory=dict)
    order: list[Known] = field(default_factory=list)
    trails: dict[Sequence, Trail] = field(default_factory=dict)

    def start(self, sequence: Sequence, tokens: list[int]) -> int:
        size, most = self.block_size, len(tokens) - 1
        passed: list[Known] = []
        for end in range(size, most + 1, size):
            if tuple(tokens[:end]) not in self.known:
                break
            passed.append(self.known[tuple(tokens[:end])])
        end = len(passed) * size
        tails = [
            self.known[tuple(tokens[:stop])]
            for stop in range(end + 1, min(most + 1, end + size))
            if tuple(tokens[:stop]) in self.known
        ]
        trail = Trail(passed, tails[-1] if tails else None)
        self.trails[sequence] = trail
        for each in [*passed, *tails[-1:]]:
            each.users.add(sequence)
            self.order = [other for other in self.order if other is not each]
        return len(tails[-1].prefix) if tails else end

    def grow(self, sequence: Sequence) -> None:
        trail, size = self.trails[sequence], self.block_size
        if trail.tail and sequence.stored > len(trail.tail.prefix):
            self._leave(sequence, trail.tail)
            trail.tail = None
        while self._open(trail) and (len(trail.passed) + 1) * size <= sequence.stored:
            prefix = tuple(sequence.tokens[: (len(trail.passed) + 1) * size])
            if prefix not in self.known:
                self.known[prefix] = Known(prefix, {sequence})
                trail.own.append(self.known[prefix])
            trail.passed.append(self.known[prefix])

    def release(self, sequence: Sequence, planned: int) -> None:
        self.grow(sequence)
        trail, tail = self.trails[sequence], tuple(sequence.tokens[: sequence.stored])
        left = sequence.stored - len(trail.passed) * self.block_size
        room = self.block_size - left
        own = left and room and not planned and trail.tail is None
        if self._open(trail) and own and tail not in self.known:
            self.known[tail] = Known(tail, set())
            self.order.append(self.known[tail])
        self._end(sequence)

    def forget(self, sequence: Sequence) -> None:
        for each in self.trails[sequence].own:
            if self.known.get(each.prefix) is each:
                self._remove(each)
        self._end(sequence)

    def evict(self, blocks: int) -> int:
        before = len(self.order)
        while before - len(self.order) < blocks and self.order:
            self._remove(self.order[0])
        return before - len(self.order)

    def clear(self) -> None:
        self.known, self.order = {}, []

    def _open(self, trail: Trail) -> bool:
        return not trail.passed or self.known.get(trail.passed[-1].prefix) is trail.passed[-1]

    def _leave(self, sequence: Sequence, each: Known) -> None:
        each.users.discard(sequence)
        if not each.users and self.known.get(each.prefix) is each and each not in self.order:
            self.order.append(each)

    def _end(self, sequence: Sequence) -> None:
        trail = self.trails.pop(sequence)
        for each in [*([trail.tail] if trail.tail else []), *trail.passed[::-1]]:
            if sequence in each.users:
                self._leave(sequence, each)
            if each in self.order:
                self.order.remove(each)
                self.order.append(each)

    def _remove(self, gone: Known) -> None:
        whole = not len(gone.prefix) % self.block_size
        for prefix, each in list(self.known.items()):
            below = whole and prefix[: len(gone.prefix)] == gone.prefix
            if each is gone or below:
                del self.known[prefix]
                self.order = [other for other in self.order if other is not each]


Step = tuple[str, int, list[int]]
"""What is done, to which sequence (modulo how many there are), and with which tokens."""

STEPS = ["start", "grow", "release"] * 6 + ["preempt", "cancel", "forget", "evict"] * 2 + ["clear"]

few_tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=12)
steps = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 5), few_tokens), min_size=10, max_size=60
)
shapes = st.builds(Shape, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(3, 14))


class Run:
    """A history on the real thing and on the naive model side by side."""

    def __init__(self, shape: Shape, *, exact: bool) -> None:
        self.world = World(shape)
        self.naive = Naive(shape.block_size)
        self.exact = exact

    def steps(self, history: list[Step]) -> None:
        for step, which, tokens in history:
            if step == "evict":
                self.evict(which)
            elif step == "clear":
                self.world.cache.clear()
                self.world.poison()
                self.naive.clear()
            elif not self.world.sequences or (step == "start" and len(self.world.sequences) < 6):
                self.start(tokens)
            else:
                self.step_of(step, self.world.sequences[which % len(self.world.sequences)], tokens)
            self.check()
        self.world.finish()

    def step_of(self, step: str, sequence: Sequence, tokens: list[int]) -> None:
        if step in {"start", "grow"}:
            self.grow(sequence, tokens)
        elif step == "forget":
            self.naive.forget(sequence)
            self.world.forget(sequence)
        elif step == "cancel":
            self.cancel(sequence, tokens)
        else:
            self.release(sequence)
            if step == "preempt":
                self.check()
                self.start(sequence.tokens)

    def start(self, tokens: list[int]) -> None:
        sequence = self.world.start(tokens)
        expected = self.naive.start(sequence, tokens)
        assert sequence.stored < len(tokens)
        assert sequence.stored == expected or not self.exact

    def grow(self, sequence: Sequence, tokens: list[int]) -> None:
        """Store what is left of a prompt, or new tokens, up to as many as ``tokens``."""
        if len(sequence.tokens) == sequence.stored:
            sequence.tokens += tokens
        num_tokens = min(len(tokens), len(sequence.tokens) - sequence.stored)
        if self.make_room(sequence, num_tokens):
            self.world.grow(sequence, num_tokens)
            self.naive.grow(sequence)

    def cancel(self, sequence: Sequence, tokens: list[int]) -> None:
        """It ends while its next tokens have slots and are not written."""
        del sequence.tokens[sequence.stored :]
        sequence.tokens += tokens
        if self.make_room(sequence, len(tokens)):
            self.world.plan(sequence, len(tokens), write=False)
            self.release(sequence, len(tokens))

    def release(self, sequence: Sequence, planned: int = 0) -> None:
        self.naive.release(sequence, planned)
        self.world.release(sequence)

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Evict for a sequence; where that is not enough, it has to go."""
        kv, size = self.world.kv, self.world.shape.block_size
        last = sequence.block_lists[0][-1:]
        room = -sequence.stored % size
        copied = bool(room) and kv.refcount(last[0]) > 1
        needed = -(-max(0, num_tokens - room) // size) + copied
        missing = needed - self.world.free_blocks
        if missing > self.world.cache.num_evictable:
            self.release(sequence)
            return False
        if missing > 0:
            self.evict(missing)
        return True

    def evict(self, blocks: int) -> None:
        freed = self.world.evict(blocks)
        expected = self.naive.evict(blocks)
        assert freed == expected or not self.exact

    def check(self) -> None:
        self.world.check()
        if self.exact:
            assert {prefix_of(entry) for entry in self.world.entries} == self.naive.known.keys()
            order = [prefix_of(entry) for entry in self.world.cache._unused]
            assert order == [each.prefix for each in self.naive.order]


HASHES: dict[str, Callable[[int, int | tuple[int, ...]], int]] = {
    "chained": REAL_HASH,
    "three values": lambda before, link: REAL_HASH(before, link) % 3,
    "constant": lambda before, link: 0,  # noqa: ARG005
}


@pytest.mark.parametrize("hashing", HASHES)
@settings(max_examples=70, deadline=None, database=None)
@given(shape=shapes, history=steps)
def test_histories(hashing: str, shape: Shape, history: list[Step]) -> None:
    """Where hashes collide there may be fewer hits, and no other difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "chain_hash", HASHES[hashing])
        Run(shape, exact=hashing == "chained").steps(history)


# -------------------------------------------------------------------------------------- examples


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
    assert world.cache.num_evictable == 0
    world.grow(sequence, 1)
    assert world.cache.num_evictable == 1
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
    assert world.free_blocks + world.cache.num_evictable == 5
    sequence = world.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert world.free_blocks + world.cache.num_evictable == 3
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
    assert world.cache.num_evictable == 1
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
    while world.cache.num_evictable:
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
    world.cache.release(kept.held, kept.tokens, kept.block_lists, kept.stored)
    world.cache.forget(forgotten.held)
    for sequence in (kept, forgotten):
        world.insert(sequence)
        world.cache.forget(sequence.held)
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
    assert world.cache.num_evictable == 0, "evicting it would free nothing"
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


def test_counters(world: World) -> None:
    world.keep(1, 2, 3, 4, 5, 6)
    world.hit(1, 2, 3, 4, 5, 6, 7)
    world.hit(1, 2, 3, 4, 0)
    world.hit(9)
    assert (world.cache.num_lookups, world.cache.num_hit_tokens) == (4, 10)
    world.evict(1)
    world.cache.clear()
    assert world.cache.num_evictions == 1


# ------------------------------------------------------------------------------------------ cost


class Tokens(abc.Sequence[int]):
    """Counts how many of them are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.tokens[index]
        self.read += len(found) if isinstance(found, list) else 1
        return found


@dataclass
class Work:
    """Tokens hashed, and tokens compared."""

    hashed: int = 0
    compared: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    continues = Entry.continues

    def counted_hash(before: int, link: int | tuple[int, ...]) -> int:
        work.hashed += len(link) if isinstance(link, tuple) else 1
        return REAL_HASH(before, link)

    def counted_continues(entry: Entry, parent: Entry, tokens: tuple[int, ...]) -> bool:
        work.compared += len(tokens)
        return continues(entry, parent, tokens)

    monkeypatch.setattr(prefix_cache, "chain_hash", counted_hash)
    monkeypatch.setattr(Entry, "continues", counted_continues)
    return work


@pytest.mark.parametrize("length", [40, 200, 1000])
def test_a_match_looks_at_each_token_once(work: Work, length: int) -> None:
    """Though the block it ends in has a tail of every length to offer."""
    world = World(Shape(block_size=32, blocks=110))
    tokens = list(range(length))
    begun = length // 32 * 32 - 32
    for end in range(begun, length):
        world.keep(*tokens[: end + 1])
    asked = Tokens(tokens)
    work.hashed = work.compared = 0
    assert world.cache.match(asked).num_tokens == length - 1
    assert max(asked.read, work.hashed, work.compared) < length
    unknown = Tokens([-1] * length)
    work.hashed = 0
    assert world.cache.match(unknown).num_tokens == 0
    assert max(unknown.read, work.hashed) < 2 * 32


def test_an_insert_looks_at_new_blocks_only(work: Work) -> None:
    world = World(Shape(block_size=8, blocks=25))
    sequence = world.start(list(range(200)))
    watched = Tokens(sequence.tokens)
    for stored in range(1, 201):
        world.plan(sequence, 1)
        sequence.stored = stored
        watched.read = work.hashed = 0
        world.cache.insert(sequence.held, watched, sequence.block_lists, stored)
        assert watched.read == work.hashed == (0 if stored % 8 else 8)


def test_a_chain_longer_than_the_stack_is_deep() -> None:
    blocks = 2 * sys.getrecursionlimit()
    world = World(Shape(block_size=1, blocks=blocks))
    sequence = world.run([0] * blocks)
    assert len(repr((world.entries[0], world.entries[-1]))) < 500
    world.release(sequence)
    world.cache.clear()
    assert world.free_blocks == blocks
