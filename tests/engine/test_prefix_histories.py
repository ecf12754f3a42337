"""Random histories of the prefix cache beside a naive model that knows no hash and no block."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine import prefix_cache
from tests.engine.prefix_cache_simulation import HASHES, Sequence, Shape, World, prefix_of


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
        if missing > len(self.world.cache.evictable_entries):
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
            order = [prefix_of(entry) for entry in self.world.cache.evictable_entries]
            assert order == [each.prefix for each in self.naive.order]


@pytest.mark.parametrize("hashing", HASHES)
@settings(max_examples=70, deadline=None, database=None)
@given(shape=shapes, history=steps)
def test_histories(hashing: str, shape: Shape, history: list[Step]) -> None:
    """Where hashes collide there may be fewer hits, and no other difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "chain_hash", HASHES[hashing])
        Run(shape, exact=hashing == "chained").steps(history)
