"""Cost of matching and inserting prefixes, counted in tokens and calls."""

from __future__ import annotations

import sys
from collections import abc
from dataclasses import dataclass
from typing import Any, overload

import pytest

from roseinfer.engine import prefix_cache
from roseinfer.engine.prefix_cache import PrefixEntry
from roseinfer.kv.sequence import CachedSequence
from tests.engine.prefix_cache_simulation import REAL_HASH, PrefixCacheSimulation, Shape


class Tokens(abc.Sequence[int]):
    """Tokens that count their reads."""

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
        items = self.tokens[index]
        self.read += len(items) if isinstance(items, list) else 1
        return items


@dataclass
class Work:
    """Numbers of tokens hashed and compared."""

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
def test_match_reads_each_token_once(work: Work, length: int) -> None:
    """This holds although the block it ends in has a tail of every length."""
    simulation = PrefixCacheSimulation(Shape(block_size=32, blocks=110))
    tokens = list(range(length))
    start = length // 32 * 32 - 32
    for end in range(start, length):
        simulation.keep(*tokens[: end + 1])
    prompt = Tokens(tokens)
    work.hashed = work.compared = 0
    assert simulation.cache.match(prompt)[2] == length - 1
    assert max(prompt.read, work.hashed, work.compared) < length
    unknown = Tokens([-1] * length)
    work.hashed = 0
    assert simulation.cache.match(unknown)[2] == 0
    assert max(unknown.read, work.hashed) < 2 * 32


def test_insert_reads_only_new_blocks(work: Work) -> None:
    simulation = PrefixCacheSimulation(Shape(block_size=8, blocks=25))
    sequence = simulation.start(list(range(200)))
    counted: Any = Tokens(sequence.tokens)
    for stored in range(1, 201):
        simulation.plan(sequence, 1)
        sequence.stored = stored
        counted.read = work.hashed = 0
        session = CachedSequence(sequence.block_lists, counted, stored)
        simulation.cache.insert(sequence.held_prefix, session)
        assert counted.read == work.hashed == (0 if stored % 8 else 8)


def test_chain_longer_than_the_recursion_limit() -> None:
    blocks = 2 * sys.getrecursionlimit()
    simulation = PrefixCacheSimulation(Shape(block_size=1, blocks=blocks))
    sequence = simulation.run([0] * blocks)
    assert len(repr((simulation.entries[0], simulation.entries[-1]))) < 500
    simulation.release(sequence)
    simulation.cache.clear()
    assert simulation.free_blocks == blocks
