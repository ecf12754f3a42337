"""Steps that the cache had to refuse are marked in the history of a failure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import (
    CacheFull,
    CacheSpec,
    Divergence,
    History,
    KVCacheAdapter,
    Ledger,
    run_history,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.row_wise_caches import RowWise
from tests.capabilities.caches.truncating_caches import CannotTrim, StateCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=2, num_blocks=2)


class LosesAllWhenFull(PagedCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        try:
            super().append(seqs, key, value)
        except CacheFull:
            self.keys.zero_()
            raise


class LosesAllButTheRowsAhead(LosesAllWhenFull, RowWise):
    pass


class LosesAllWhenItCannotTruncate(StateCache):
    def truncate(self, seq: int, length: int) -> None:
        try:
            super().truncate(seq, length)
        except CannotTrim:
            self.keys.zero_()
            raise


@pytest.mark.parametrize(
    ("cache", "steps", "pattern"),
    [
        (
            LosesAllWhenFull,
            [Append((0, 1)), Append((0, 1)), Append((0,))],
            r"3\. append .*; refused: no room \(1 block needed, 0 free\)",
        ),
        (
            LosesAllButTheRowsAhead,
            [Append((0,)), Append((0,)), Append((1, 0, 2))],
            r"3\. append .*; refused after its first 1 row: no room \(3 blocks needed, 1 free\)",
        ),
        (
            LosesAllWhenItCannotTruncate,
            [Append((0,)), Append((0,)), Append((0,)), Truncate(0, 1)],
            r"4\. .*; refused: it cannot be truncated",
        ),
    ],
)
def test_refused_step_is_marked_with_its_reason(
    cache: type[KVCacheAdapter], steps: list[Operation], pattern: str
) -> None:
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(SPEC, tuple(steps)))
    lines = str(failure.value).splitlines()
    assert [line.strip() for line in lines if "; refused" in line and re.search(pattern, line)]
    assert sum("; refused" in line for line in lines) == 1


class RaisesWithoutAMessage(PagedCache):
    def append(self, *_: object) -> None:
        raise CacheFull


class Breaks(PagedCache):
    def append(self, *_: object) -> None:
        raise IndexError("pop from empty list")


class RunsOut(PagedCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        try:
            super().append(seqs, key, value)
        except CacheFull:
            raise IndexError("pop from empty list") from None


class RunsOutWithPrefixReuse(RunsOut):
    prefixes = RunsOut.prefixes.but(shares="equal prefixes")

    def use_tokens(self, message: object) -> None:
        """Reuse nothing."""


@pytest.mark.parametrize(
    ("cache", "seqs", "message"),
    [
        (
            RaisesWithoutAMessage,
            (0,),
            "refused a write that fits (1 block needed, 2 free): CacheFull"
            "; layer 0: 2 free by the oracle, 2 by the ledger; the cache's own count is not shown "
            "(Ledger.num_free)",
        ),
        (
            Breaks,
            (0,),
            "the write raised IndexError: pop from empty list (1 block needed, 2 free)",
        ),
        (
            RunsOutWithPrefixReuse,
            (0, 1, 2),
            "the write raised IndexError: pop from empty list (3 blocks needed, 2 free); if it "
            "fits only with blocks that are reused, raise one of full_errors (CacheFull)",
        ),
        (
            RunsOut,
            (0, 1, 2),
            "the write raised IndexError: pop from empty list; expected one of full_errors "
            "(CacheFull): no room (3 blocks needed, 2 free)",
        ),
    ],
)
def test_wrong_refusal_names_the_expected_outcome(
    cache: type[KVCacheAdapter], seqs: tuple[int, ...], message: str
) -> None:
    texts = ((0, 0),) if "use_tokens" in cache.abilities else ()
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(SPEC, (Append(seqs),), texts=texts))
    assert failure.value.summary == message


class ShowsItsCount(RaisesWithoutAMessage):
    def ledger(self, layer: int) -> Ledger:
        return replace(super().ledger(layer), num_free=2)


def test_refusal_by_a_cache_that_shows_its_count_has_no_hint() -> None:
    with pytest.raises(Divergence) as failure:
        run_history(ShowsItsCount, History(SPEC, (Append((0,)),)))
    assert failure.value.summary.endswith("layer 0: 2 free by the oracle, 2 by the ledger")


class HasAStaleTable(PagedCache):
    """Shows a table of a sequence that lacks its last block."""

    def peek(self, seq: int, layer: int) -> Any:
        blocks, lengths = self.tables[seq], [1] * (self.lengths[seq] + 1)
        list(zip(blocks, lengths, strict=True))
        return super().peek(seq, layer)


def test_lengths_that_differ_are_named_by_their_line() -> None:
    with pytest.raises(Divergence) as failure:
        run_history(HasAStaleTable, History(SPEC, (Append((0,)),)))
    message = (
        r"peek\(0, 0\) raised ValueError: zip\(\) argument 2 is longer than argument 1 "
        r"\(test_refused_steps.py, line \d+, in peek: "
        r"list\(zip\(blocks, lengths, strict=True\)\)\); one of them is stale"
    )
    assert re.match(message, failure.value.summary)


class HasASwitch(RaisesWithoutAMessage):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"fast": (True, False)}

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Accept any value."""


def test_message_has_the_switches_that_a_step_has_set() -> None:
    spec = replace(SPEC, options={"fast": True})
    for last, words in ((False, "\nswitches at this step: fast=False\n"), (True, "")):
        steps = (SetOptions({"fast": False}), SetOptions({"fast": last}), Append((0,)))
        with pytest.raises(Divergence) as failure:
            run_history(HasASwitch, History(spec, steps))
        assert ("switches at this step" in str(failure.value)) == bool(words)
        assert words in str(failure.value)


class LosesABlockOfEach(PagedCache):
    """Shows no table, which would reveal the leak at once."""

    table: Any = KVCacheAdapter.table  # not offered

    def free(self, seq: int) -> None:
        self.tables[seq].pop()
        super().free(seq)


def test_refusal_caused_by_a_leak_names_the_leaking_step() -> None:
    steps = (Append((0, 1)), Free(1), Append((2,)), Free(0), Append((3,)))
    with pytest.raises(Divergence) as failure:
        run_history(LosesABlockOfEach, History(SPEC, steps[:3]))
    leaked = "layer 0: 1 free by the oracle, 0 by the ledger, which differ since step 2"
    assert failure.value.summary.endswith(f"CacheFull: 1 blocks needed, 0 free; {leaked}")
    larger = replace(SPEC, num_blocks=3)
    with pytest.raises(Divergence, match=r"2 free by the oracle, 0 by the ledger, .* since step 2"):
        run_history(LosesABlockOfEach, History(larger, steps))


class LosesAllWhenItFrees(PagedCache):
    def free(self, seq: int) -> None:
        super().free(seq)
        self.keys.zero_()


def test_accepted_step_is_not_marked() -> None:
    with pytest.raises(Divergence) as failure:
        run_history(LosesAllWhenItFrees, History(SPEC, (Append((0, 1)), Free(1))))
    assert "; refused" not in str(failure.value)
