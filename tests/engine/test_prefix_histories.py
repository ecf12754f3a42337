"""Random histories of the prefix cache, compared with a naive model without hashes and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine import prefix_cache
from tests.engine.prefix_cache_simulation import (
    HASHES,
    PrefixCacheSimulation,
    Sequence,
    Shape,
    prefix_of,
)


@dataclass(eq=False)
class NaiveBlock:
    """A block of the naive model: the prefix that ends in it, and its users."""

    prefix: tuple[int, ...]
    users: set[Sequence]


@dataclass(eq=False)
class NaiveSequence:
    """Position of a sequence in the naive model: the blocks it passed, its own or not."""

    passed: list[NaiveBlock]
    tail: NaiveBlock | None
    inserted: list[NaiveBlock] = field(default_factory=list)


@dataclass
class NaivePrefixCache:
    """Cached prefixes and their order of eviction, without hashes and blocks."""

    block_size: int
    cached: dict[tuple[int, ...], NaiveBlock] = field(default_factory=dict)
    order: list[NaiveBlock] = field(default_factory=list)
    states: dict[Sequence, NaiveSequence] = field(default_factory=dict)

    def start(self, sequence: Sequence, tokens: list[int]) -> int:
        size, max_cached = self.block_size, len(tokens) - 1
        passed: list[NaiveBlock] = []
        for end in range(size, max_cached + 1, size):
            if tuple(tokens[:end]) not in self.cached:
                break
            passed.append(self.cached[tuple(tokens[:end])])
        end = len(passed) * size
        tails = [
            self.cached[tuple(tokens[:stop])]
            for stop in range(end + 1, min(max_cached + 1, end + size))
            if tuple(tokens[:stop]) in self.cached
        ]
        state = NaiveSequence(passed, tails[-1] if tails else None)
        self.states[sequence] = state
        for each in [*passed, *tails[-1:]]:
            each.users.add(sequence)
            self.order = [other for other in self.order if other is not each]
        return len(tails[-1].prefix) if tails else end

    def grow(self, sequence: Sequence) -> None:
        state, size = self.states[sequence], self.block_size
        if state.tail and sequence.stored > len(state.tail.prefix):
            self._leave(sequence, state.tail)
            state.tail = None
        computed_again = False
        while self._open(state) and (len(state.passed) + 1) * size <= sequence.stored:
            prefix = tuple(sequence.tokens[: (len(state.passed) + 1) * size])
            computed_again |= prefix in self.cached
            if prefix not in self.cached:
                self.cached[prefix] = NaiveBlock(prefix, {sequence})
                state.inserted.append(self.cached[prefix])
            state.passed.append(self.cached[prefix])
        if computed_again:
            self._renew(state.passed[::-1])

    def release(self, sequence: Sequence) -> None:
        self.grow(sequence)
        state, tail = self.states[sequence], tuple(sequence.tokens[: sequence.stored])
        num_tail_tokens = sequence.stored - len(state.passed) * self.block_size
        room = self.block_size - num_tail_tokens
        is_tail = num_tail_tokens and room and state.tail is None
        if self._open(state) and is_tail and tail not in self.cached:
            self.cached[tail] = NaiveBlock(tail, set())
            self.order.append(self.cached[tail])
        self._end(sequence)

    def forget(self, sequence: Sequence) -> None:
        for each in self.states[sequence].inserted:
            if self.cached.get(each.prefix) is each:
                self._remove(each)
        self._end(sequence)

    def evict(self, blocks: int) -> int:
        before = len(self.order)
        while before - len(self.order) < blocks and self.order:
            self._remove(self.order[0])
        return before - len(self.order)

    def clear(self) -> None:
        self.cached, self.order = {}, []

    def _open(self, state: NaiveSequence) -> bool:
        return not state.passed or self.cached.get(state.passed[-1].prefix) is state.passed[-1]

    def _leave(self, sequence: Sequence, each: NaiveBlock) -> None:
        each.users.discard(sequence)
        if not each.users and self.cached.get(each.prefix) is each and each not in self.order:
            self.order.append(each)

    def _end(self, sequence: Sequence) -> None:
        state = self.states.pop(sequence)
        for each in [*([state.tail] if state.tail else []), *state.passed[::-1]]:
            if sequence in each.users:
                self._leave(sequence, each)
            self._renew([each])

    def _renew(self, blocks: list[NaiveBlock]) -> None:
        for each in blocks:
            if each in self.order:
                self.order.remove(each)
                self.order.append(each)

    def _remove(self, evicted: NaiveBlock) -> None:
        whole = not len(evicted.prefix) % self.block_size
        for prefix, each in list(self.cached.items()):
            below = whole and prefix[: len(evicted.prefix)] == evicted.prefix
            if each is evicted or below:
                del self.cached[prefix]
                self.order = [other for other in self.order if other is not each]


Step = tuple[str, int, list[int]]
"""The operation, its sequence (modulo their number), and its tokens."""

STEPS = ["start", "grow", "release"] * 6 + ["preempt", "cancel", "forget", "evict"] * 2 + ["clear"]

few_tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=12)
steps = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 5), few_tokens), min_size=10, max_size=60
)
shapes = st.builds(Shape, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(3, 14))


class Run:
    """A history run on the prefix cache and on the naive model."""

    def __init__(self, shape: Shape, *, exact: bool) -> None:
        self.simulation = PrefixCacheSimulation(shape)
        self.naive = NaivePrefixCache(shape.block_size)
        self.exact = exact

    def run_steps(self, history: list[Step]) -> None:
        for step, which, tokens in history:
            if step == "evict":
                self.evict(which)
            elif step == "clear":
                self.simulation.cache.clear()
                self.simulation.poison()
                self.naive.clear()
            elif not self.simulation.sequences or (
                step == "start" and len(self.simulation.sequences) < 6
            ):
                self.start(tokens)
            else:
                self.run_step(
                    step, self.simulation.sequences[which % len(self.simulation.sequences)], tokens
                )
            self.check()
        self.simulation.finish()

    def run_step(self, step: str, sequence: Sequence, tokens: list[int]) -> None:
        if step in {"start", "grow"}:
            self.grow(sequence, tokens)
        elif step == "forget":
            self.naive.forget(sequence)
            self.simulation.forget(sequence)
        elif step == "cancel":
            self.cancel(sequence, tokens)
        else:
            self.release(sequence)
            if step == "preempt":
                self.check()
                self.start(sequence.tokens)

    def start(self, tokens: list[int]) -> None:
        sequence = self.simulation.start(tokens)
        expected = self.naive.start(sequence, tokens)
        assert sequence.stored < len(tokens)
        assert sequence.stored == expected or not self.exact

    def grow(self, sequence: Sequence, tokens: list[int]) -> None:
        """Store unstored tokens of a prompt, or new tokens, at most as many as ``tokens``."""
        if len(sequence.tokens) == sequence.stored:
            sequence.tokens += tokens
        num_tokens = min(len(tokens), len(sequence.tokens) - sequence.stored)
        if self.make_room(sequence, num_tokens):
            self.simulation.grow(sequence, num_tokens)
            self.naive.grow(sequence)

    def cancel(self, sequence: Sequence, tokens: list[int]) -> None:
        """End a sequence whose next tokens have slots and are not written."""
        del sequence.tokens[sequence.stored :]
        sequence.tokens += tokens
        if self.make_room(sequence, len(tokens)):
            self.simulation.plan(sequence, len(tokens), write=False)
            self.simulation.truncate(sequence)
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        self.naive.release(sequence)
        self.simulation.release(sequence)

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Evict for a sequence; if that is not enough, release the sequence."""
        kv, size = self.simulation.kv, self.simulation.shape.block_size
        last = sequence.block_lists[0][-1:]
        room = -sequence.stored % size
        copied = bool(room) and kv.refcount(last[0]) > 1
        needed = -(-max(0, num_tokens - room) // size) + copied
        missing = needed - self.simulation.free_blocks
        if missing > len(self.simulation.cache.evictable_entries):
            self.release(sequence)
            return False
        if missing > 0:
            self.evict(missing)
        return True

    def evict(self, blocks: int) -> None:
        freed = self.simulation.evict(blocks)
        expected = self.naive.evict(blocks)
        assert freed == expected or not self.exact

    def check(self) -> None:
        self.simulation.check()
        if self.exact:
            assert {
                prefix_of(entry) for entry in self.simulation.entries
            } == self.naive.cached.keys()
            order = [prefix_of(entry) for entry in self.simulation.cache.evictable_entries]
            assert order == [each.prefix for each in self.naive.order]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("hashing", HASHES)
@settings(max_examples=70, deadline=None, database=None)
@given(shape=shapes, history=steps)
def test_random_histories_match_the_naive_model(
    hashing: str, shape: Shape, history: list[Step]
) -> None:
    """Hash collisions may cost hits and change nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "chain_hash", HASHES[hashing])
        Run(shape, exact=hashing == "chained").run_steps(history)
