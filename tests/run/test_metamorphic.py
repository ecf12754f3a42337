"""Metamorphic checks: they run a history's counterpart only where the two can differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from pytest_roseinfer import CacheSpec, Divergence, History
from pytest_roseinfer.capabilities.beams import Reorder
from pytest_roseinfer.capabilities.disaggregation import (
    BeginReceive,
    EndReceiveTransfer,
    FinishReceive,
    MakeRemote,
    RemotePrefill,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.prefixes import BeginWith, LookUp
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.run.metamorphic import (
    check_copied,
    check_every_option,
    check_permuted,
    check_split,
)
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from tests.capabilities.caches.beam_caches import RowCache
from tests.capabilities.caches.branching_text_caches import BranchingTextCache
from tests.capabilities.caches.disaggregated_caches import PushedCache
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.text_cache import HashedTextCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

ONE_BY_ONE = (Append((0,)), Append((1,)))
TOGETHER = (*ONE_BY_ONE, Append((0, 1)))
FORKED = (Append((0,)), Fork(0, 1))


@pytest.mark.parametrize(
    ("check", "steps", "runs"),
    [
        (check_permuted, ONE_BY_ONE, 1),
        (check_permuted, TOGETHER, 2),
        (check_split, ONE_BY_ONE, 1),
        (check_split, TOGETHER, 2),
        (check_copied, TOGETHER, 1),
        (check_copied, FORKED, 2),
    ],
)
def test_counterpart_runs_only_if_it_can_differ(
    check: Callable[[type[KVCacheAdapter], History], None],
    steps: tuple[Operation, ...],
    runs: int,
) -> None:
    specs: list[CacheSpec] = []

    class Recording(GroupedManager):
        def make(self, spec: CacheSpec) -> None:
            super().make(spec)
            specs.append(spec)

    check(Recording, History(CacheSpec(options={"triton": False}), steps))
    assert len(specs) == runs


def test_batch_that_is_not_possible_is_not_split() -> None:
    """Sequence 0 is not there, as a transfer for it failed; half of the batch would be possible."""
    failing = (RemotePrefill(0, 1), BeginReceive(0, 1), EndReceiveTransfer(0, "failed"))
    steps = (MakeRemote(1, 4), *failing, FinishReceive(0), Append((1,)), Append((1, 0)))
    check_split(PushedCache, History(CacheSpec(), steps))


def test_beams_that_are_copied_have_room() -> None:
    """Sequence 1 becomes a copy of three tokens, of which the checks must know."""
    steps = (Append((0,)), Append((0,)), Append((0, 1)), Reorder((0, 1), (0, 0)), Append((1, 0)))
    history = History(CacheSpec(block_size=1, num_blocks=8), steps)
    for check in (check_permuted, check_split):
        check(RowCache, history)


def test_found_prefix_may_depend_on_order_with_equal_hashes() -> None:
    """The first tokens of texts 0 and 4 have one hash, for which the cache stores one block."""
    steps = (Append((4, 0)), LookUp(5, 1), BeginWith(5))
    history = History(CacheSpec(block_size=1), steps, texts=((0, 0),) * 5)
    check_permuted(HashedTextCache, history)


class MissesUnorderedBatches(HashedTextCache):
    """Does not find a text that was written in a batch out of order."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.in_order = [*seqs] == sorted(seqs)
        super().append(seqs, key, value)

    def begin_with(self, found: Any, seq: int) -> int:
        return super().begin_with(found if self.in_order else [], seq)


def test_found_prefix_must_not_depend_on_order_without_equal_hashes() -> None:
    steps = (Append((0, 1)), LookUp(5, 1), BeginWith(5))
    history = History(CacheSpec(block_size=1), steps, texts=((0, 0),) * 5)
    with pytest.raises(Divergence, match="differs from the run without its batches in reverse"):
        check_permuted(MissesUnorderedBatches, history)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_copy_has_as_many_tokens_as_were_found(num_tokens: int) -> None:
    """The number of found tokens is unknown before the run, and a copy shares no block."""
    reuse_steps = (LookUp(0, num_tokens), BeginWith(0), Append((0,)), Fork(0, 1), Append((0, 1)))
    steps = (*(Append((0,)),) * num_tokens, Free(0), *reuse_steps)
    equal_texts = (0, 0), (0, 1 << 16)
    check_copied(BranchingTextCache, History(CacheSpec(block_size=1), steps, texts=equal_texts))


class HasSpareBlocks(PagedCache):
    """Has blocks that no sequence may use, and more of them under an option."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"spare": (0, 3)}

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        spare = torch.zeros_like(self.keys[:, :1]).repeat(1, spec.options["spare"], 1, 1, 1)
        self.keys, self.values = (torch.cat([own, spare], 1) for own in (self.keys, self.values))


def test_option_may_change_the_size_of_the_storage() -> None:
    spec = CacheSpec(num_blocks=2, options={"spare": 0})
    check_every_option(HasSpareBlocks, History(spec, (Append((0,)),)))
