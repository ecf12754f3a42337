"""What finding and keeping a prefix costs, counted and not timed."""

from __future__ import annotations

import sys
from collections import abc
from dataclasses import dataclass
from typing import Any, overload

import pytest

from roseinfer.engine import prefix_cache
from roseinfer.engine.prefix_cache import PrefixEntry
from roseinfer.kv.sequence import CachedSequence
from tests.engine.prefix_cache_simulation import REAL_HASH, Shape, World


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
    """How many tokens were hashed, and how many compared."""

    hashed: int = 0
    compared: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    continues = PrefixEntry.continues

    def counted_hash(before: int, link: int | tuple[int, ...]) -> int:
        work.hashed += len(link) if isinstance(link, tuple) else 1
        return REAL_HASH(before, link)

    def counted_continues(entry: PrefixEntry, parent: PrefixEntry, tokens: tuple[int, ...]) -> bool:
        work.compared += len(tokens)
        return continues(entry, parent, tokens)

    monkeypatch.setattr(prefix_cache, "chain_hash", counted_hash)
    monkeypatch.setattr(PrefixEntry, "continues", counted_continues)
    return work


@pytest.mark.parametrize("length", [40, 200, 1000])
def test_a_match_looks_at_each_token_once(work: Work, length: int) -> None:
    """This holds though the block it ends in has a tail of every length to offer."""
    world = World(Shape(block_size=32, blocks=110))
    tokens = list(range(length))
    begun = length // 32 * 32 - 32
    for end in range(begun, length):
        world.keep(*tokens[: end + 1])
    asked = Tokens(tokens)
    work.hashed = work.compared = 0
    assert world.cache.match(asked)[2] == length - 1
    assert max(asked.read, work.hashed, work.compared) < length
    unknown = Tokens([-1] * length)
    work.hashed = 0
    assert world.cache.match(unknown)[2] == 0
    assert max(unknown.read, work.hashed) < 2 * 32


def test_an_insert_looks_at_new_blocks_only(work: Work) -> None:
    world = World(Shape(block_size=8, blocks=25))
    sequence = world.start(list(range(200)))
    watched: Any = Tokens(sequence.tokens)
    for stored in range(1, 201):
        world.plan(sequence, 1)
        sequence.stored = stored
        watched.read = work.hashed = 0
        session = CachedSequence(sequence.block_lists, watched, stored)
        world.cache.insert(sequence.held, session)
        assert watched.read == work.hashed == (0 if stored % 8 else 8)


def test_a_chain_longer_than_the_stack_is_deep() -> None:
    blocks = 2 * sys.getrecursionlimit()
    world = World(Shape(block_size=1, blocks=blocks))
    sequence = world.run([0] * blocks)
    assert len(repr((world.entries[0], world.entries[-1]))) < 500
    world.release(sequence)
    world.cache.clear()
    assert world.free_blocks == blocks
