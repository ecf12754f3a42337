"""What a fork shares is for the adapter to say, and the cache is held to it."""

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

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_roseinfer.capabilities.operation import Operation


class SharesNothing(PagedCache):
    """It copies every block at once."""

    fork_shares = "nothing"

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        needed = -(-key.shape[1] // self.spec.block_size)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for at in range(key.shape[1]):
            self.append([seq], key[:, at : at + 1], value[:, at : at + 1])

    def shared(self, parent: int) -> int:  # noqa: ARG002
        """Return how many of the parent's blocks its forks share."""
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
        held = self.tables.pop(seq)
        others = {block for table in self.tables.values() for block in table}
        self.unused += [block for block in held if block not in others]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002  (one for all layers)
        named = [block for table in self.tables.values() for block in table]
        held = {block: named.count(block) for block in named}
        return Ledger(held, self.unused, self.spec.num_blocks)


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


class TakesWhatThereIs(SharesNothing):
    def make_room(self, blocks: int) -> None:
        if blocks > len(self.unused):
            self.unused.clear()
        super().make_room(blocks)


class ForksAnyway(SharesFullBlocks):
    """Out of blocks, it lets the child have its parent's."""

    def fork(self, parent: int, child: int) -> None:
        try:
            super().fork(parent, child)
        except CacheFull:
            self.tables[child] = list(self.tables[parent])
            self.lengths[child] = self.lengths[parent]


def after(*steps: Operation, blocks: int = 8) -> History:
    return History(CacheSpec(block_size=2, num_blocks=blocks), steps)


@pytest.fixture(autouse=True)
def short_run() -> Iterator[None]:
    """A few histories, whatever was asked of the run these tests are part of."""
    asked, seen = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=60, steps=10, seed=1))
    coverage.set_current(coverage.Coverage())
    yield
    settings.set_current(asked)
    coverage.set_current(seen)


@pytest.mark.parametrize("cache", [SharesNothing, SharesFullBlocks])
def test_a_right_declaration_passes(cache: type[KVCacheAdapter]) -> None:
    tests = conformance(cache)()
    tests.test_histories()
    tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.parametrize(
    ("cache", "length", "said"),
    [
        (ClaimsToShareAll, 3, "a block was copied needlessly"),
        (ClaimsToShareFullBlocks, 2, "a block was copied needlessly"),
        (ClaimsToShareNothing, 2, "shared with a sequence that must have one of its own"),
    ],
)
def test_a_wrong_one_is_found(cache: type[KVCacheAdapter], length: int, said: str) -> None:
    with pytest.raises(Divergence, match=said):
        run_history(cache, after(Prefill(0, length), Fork(0, 1)))
    with pytest.raises(Divergence):
        conformance(cache)().test_histories()


FULL = after(Prefill(0, 3), Fork(0, 1), blocks=2)
"""The copy of a partial block finds none free."""


def test_a_fork_that_finds_no_room_is_refused_and_changes_nothing() -> None:
    run_history(SharesFullBlocks, FULL)
    run_history(SharesNothing, FULL)
    with pytest.raises(Divergence, match="refused a step that fits: CacheFull: not today"):
        run_history(RefusesForks, after(Prefill(0, 3), Fork(0, 1)))
    with pytest.raises(Divergence, match="accepted a step that does not fit"):
        run_history(ForksAnyway, FULL)
    with pytest.raises(Divergence, match=r"0 free \+ 2 held blocks are not the 3 there are"):
        run_history(TakesWhatThereIs, after(Prefill(0, 4), Fork(0, 1), blocks=3))


def test_an_unknown_one_is_refused() -> None:
    unknown = type("Unknown", (PagedCache,), {"fork_shares": "some"})
    with pytest.raises(
        TypeError,
        match=r"Unknown\.fork_shares is 'some': choose one of 'blocks', 'full blocks', 'nothing'",
    ):
        conformance(unknown)
