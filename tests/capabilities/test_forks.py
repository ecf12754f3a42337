"""Blocks that a fork shares: each choice of the adapter is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import (
    CacheFull,
    CacheSpec,
    Divergence,
    History,
    KVCacheAdapter,
    Ledger,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import Prefill
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.paged_cache import PagedCache
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_roseinfer.capabilities.operation import Operation


class SharesNothing(PagedCache):
    """Copies every block at once."""

    fork_shares = "nothing"

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        needed = -(-key.shape[1] // self.spec.block_size)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for at in range(key.shape[1]):
            self.append([seq], key[:, at : at + 1], value[:, at : at + 1])

    def shared(self, parent: int) -> int:  # noqa: ARG002
        """Return the number of the parent's blocks that its forks share."""
        return 0

    def fork(self, parent: int, child: int) -> None:
        table = self.tables[parent]
        own = table[self.shared(parent) :]
        self.make_room(len(own))
        copies = [self.unused.pop(0) for _ in own]
        for cache in (self.keys, self.values):
            cache[:, copies] = cache[:, own]
        self.tables[child] = table[: self.shared(parent)] + copies
        self.lengths[child] = self.lengths[parent]

    def make_room(self, blocks: int) -> None:
        if blocks > len(self.unused):
            raise CacheFull(f"{blocks} blocks needed, {len(self.unused)} free")

    def free(self, seq: int) -> None:
        del self.lengths[seq]
        blocks = self.tables.pop(seq)
        others = {block for table in self.tables.values() for block in table}
        self.unused += [block for block in blocks if block not in others]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002  (one for all layers)
        table_blocks = [block for table in self.tables.values() for block in table]
        blocks = {block: table_blocks.count(block) for block in table_blocks}
        return Ledger(blocks, self.unused, self.spec.num_blocks)


class SharesFullBlocks(SharesNothing):
    fork_shares = "full blocks"

    def shared(self, parent: int) -> int:
        return self.lengths[parent] // self.spec.block_size


class ClaimsToShareAll(SharesFullBlocks):
    fork_shares = "blocks"


class ClaimsToShareFullBlocks(SharesNothing):
    fork_shares = "full blocks"


class ClaimsToShareNothing(SharesFullBlocks):
    fork_shares = "nothing"


class RefusesForks(SharesFullBlocks):
    def make_room(self, blocks: int) -> None:  # noqa: ARG002
        raise CacheFull("not today")


class TakesBlocksBeforeRefusing(SharesNothing):
    def make_room(self, blocks: int) -> None:
        if blocks > len(self.unused):
            self.unused.clear()
        super().make_room(blocks)


class ForksAnyway(SharesFullBlocks):
    """Lets the child share its parent's blocks when no block is free."""

    def fork(self, parent: int, child: int) -> None:
        try:
            super().fork(parent, child)
        except CacheFull:
            self.tables[child] = list(self.tables[parent])
            self.lengths[child] = self.lengths[parent]


def history_of(*steps: Operation, blocks: int = 8) -> History:
    return History(CacheSpec(block_size=2, num_blocks=blocks), steps)


@pytest.fixture(autouse=True)
def short_run() -> Iterator[None]:
    """Run few histories, whatever the enclosing run's settings are."""
    previous_settings, previous_coverage = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=60, steps=10, seed=1))
    coverage.set_current(coverage.Coverage())
    yield
    settings.set_current(previous_settings)
    coverage.set_current(previous_coverage)


@pytest.mark.parametrize("cache", [SharesNothing, SharesFullBlocks])
@few_or_many_examples(8, 60)
def test_right_choice_of_shared_blocks_passes(cache: type[KVCacheAdapter], examples: int) -> None:
    settings.set_current(settings.Settings(examples=examples, steps=10, seed=1))
    tests = conformance(cache)()
    tests.test_histories()
    tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.parametrize(
    ("cache", "length", "message"),
    [
        (ClaimsToShareAll, 3, "a block was copied needlessly"),
        (ClaimsToShareFullBlocks, 2, "a block was copied needlessly"),
        (ClaimsToShareNothing, 2, "shared with a sequence that must have one of its own"),
    ],
)
def test_wrong_choice_of_shared_blocks_fails(
    cache: type[KVCacheAdapter], length: int, message: str
) -> None:
    with pytest.raises(Divergence, match=message):
        run_history(cache, history_of(Prefill(0, length), Fork(0, 1)))
    with pytest.raises(Divergence):
        conformance(cache)().test_histories()


FULL = history_of(Prefill(0, 3), Fork(0, 1), blocks=2)
"""A history in which the copy of a partial block finds no free block."""


def test_fork_without_room_is_refused_and_changes_nothing() -> None:
    run_history(SharesFullBlocks, FULL)
    run_history(SharesNothing, FULL)
    with pytest.raises(Divergence, match="refused a step that fits: CacheFull: not today"):
        run_history(RefusesForks, history_of(Prefill(0, 3), Fork(0, 1)))
    with pytest.raises(Divergence, match="accepted a step that does not fit"):
        run_history(ForksAnyway, FULL)
    with pytest.raises(Divergence, match=r"0 free \+ 2 held blocks are not the 3 there are"):
        run_history(TakesBlocksBeforeRefusing, history_of(Prefill(0, 4), Fork(0, 1), blocks=3))


def test_unknown_choice_of_shared_blocks_is_refused() -> None:
    unknown = type("Unknown", (PagedCache,), {"fork_shares": "some"})
    with pytest.raises(
        TypeError,
        match=r"Unknown\.fork_shares is 'some': choose one of 'blocks', 'full blocks', 'nothing'",
    ):
        conformance(unknown)
