"""The large histories: bugs that need many rows, long tables or long contexts are found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_roseinfer import (
    CacheFull,
    CacheSpec,
    Divergence,
    KVCacheAdapter,
    conformance,
    settings,
)
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.histories.large import large_histories
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run.coverage import current
from pytest_roseinfer.search import shrink
from pytest_roseinfer.suite import large_search
from pytest_roseinfer.suite.large_search import LargeHistories
from tests.fresh_run import fresh_run
from tests.tutorials.paged_kv import NoBlocks, PagedKV, Seq

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Pair = tuple[torch.Tensor, torch.Tensor]


class Cache(KVCacheAdapter):
    """The cache of the tutorial, which also attends."""

    full_errors = (CacheFull, NoBlocks)
    wrong_from = 0
    """The first row whose keys are those of the first; 0 for none."""
    most_blocks = 0
    """The most entries of a table that are read; 0 for all."""
    dropped: int | None = None
    """The token that nobody attends to."""

    def make(self, spec: CacheSpec) -> None:
        dtype = getattr(torch, spec.dtype)
        sizes = spec.num_layers, spec.num_blocks, spec.block_size, spec.num_heads, spec.head_dim
        self.kv, self.seqs = PagedKV(*sizes, dtype), dict[int, Seq]()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if self.wrong_from and len(seqs) > self.wrong_from:
            at = self.wrong_from
            key = torch.cat([key[:, :at], key[:, :1].expand(-1, len(seqs) - at, -1, -1)], 1)
        found = [self.seqs.get(seq) or Seq() for seq in seqs]
        self.kv.extend(found, key, value)
        self.seqs.update(zip(seqs, found, strict=True))

    def fork(self, parent: int, child: int) -> None:
        self.seqs[child] = self.kv.fork(self.seqs[parent])

    def free(self, seq: int) -> None:
        self.kv.drop(self.seqs.pop(seq))

    def peek(self, seq: int, layer: int) -> Pair:
        return self.kv.read(self.seqs[seq], layer)

    def gather(self, seq: int, layer: int) -> Pair:
        keys, values = self.peek(seq, layer)
        most = self.most_blocks * self.kv.size
        if most and len(keys) > most:
            keys = torch.cat([keys[:most], keys[: len(keys) - most]])
        return keys, values

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        found = []
        for row, seq in enumerate(seqs):
            keys, values = (each.double() for each in self.peek(seq, layer))
            if self.dropped is not None:
                there = torch.arange(len(keys)) != self.dropped
                keys, values = keys[there], values[there]
            each = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(each, 1), values.repeat_interleave(each, 1)
            scores = (query[row].double() * keys).sum(-1) * query.shape[-1] ** -0.5
            found.append((torch.softmax(scores, 0)[..., None] * values).sum(0))
        return torch.stack(found).to(query.dtype)


class WrongFromRow9(Cache):
    wrong_from = 8


class WrongFromRow65(Cache):
    wrong_from = 64


class ShortTable(Cache):
    most_blocks = 32


class DropsToken256(Cache):
    dropped = 256


class ForgetsRow65(Cache):
    """It attends with the first 64 rows alone."""

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        found = super().attend(seqs, query, layer)
        found[64:] = 0
        return found


@pytest.fixture(autouse=True)
def _profile_dev(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 4.0)
    with fresh_run(settings.Settings(seed=1, failures_dir=None)):
        yield


def search(adapter: type[KVCacheAdapter]) -> None:
    made: Any = conformance(adapter)()
    made.test_histories()


def test_a_cache_that_is_right_passes_and_the_largest_sizes_are_told() -> None:
    search(Cache)
    target = current().of(Cache)
    assert TargetVerdict(target).sizes == "largest: 70 rows, 130 blocks, 518 tokens"
    assert target.histories == settings.current().examples


@pytest.mark.many_alike
@pytest.mark.parametrize(("adapter", "least"), [(WrongFromRow9, 9), (WrongFromRow65, 65)])
def test_wrong_rows_are_found_and_few_are_shown(adapter: type[Cache], least: int) -> None:
    with pytest.raises(Divergence) as caught:
        search(adapter)
    (step,) = caught.value.history.operations
    assert least <= len(step.rows()) <= 70


@pytest.mark.many_alike
@pytest.mark.parametrize("adapter", [ShortTable, DropsToken256, ForgetsRow65])
def test_what_needs_a_long_table_or_context_or_many_rows_is_found(
    monkeypatch: pytest.MonkeyPatch, adapter: type[Cache]
) -> None:
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 0.5)
    with pytest.raises(Divergence):
        search(adapter)


def test_a_slow_cache_is_given_as_much_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Slow(Cache):
        def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
            now[0] += 0.1 * (len(seqs) > 8) + 0.001
            super().append(seqs, key, value)

    monkeypatch.setattr(large_search, "monotonic", lambda: now[0])
    monkeypatch.setattr(LargeHistories, "seconds", 0.4)
    search(Slow)
    told = TargetVerdict(current().of(Slow)).sizes
    assert told.startswith("largest: 33 rows")
    assert told.endswith("(large histories cut short: 2, for lack of time)")


def test_every_kind_of_row_comes_behind_the_64th() -> None:
    history = next(large_histories(Cache, {}, "cpu"))
    oracle = Oracle.of(Cache, history.spec)
    met: set[str] = set()
    for step in history.operations:
        assert step.fits(oracle)
        met.update(oracle.conditions_met(step.rows())[64:])
        step.apply(oracle)
    assert met == {"fresh", "in_place", "rollover", "rollover_shared", "copy_on_write"}


class Slots(Cache):
    """A cache that is made for 16 sequences, and has a slot for each."""

    slots = 16

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len({*self.seqs, *seqs}) > self.slots:
            raise IndexError("no slot left")
        super().append(seqs, key, value)

    def fork(self, parent: int, child: int) -> None:
        if len(self.seqs) >= self.slots:
            raise IndexError("no slot left")
        super().fork(parent, child)


class SlotsThatAreStated(Slots):
    most_sequences = 16


class Short(Cache):
    """A cache whose sequences have room for 200 tokens."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if any(seq in self.seqs and self.seqs[seq].length >= 200 for seq in seqs):
            raise IndexError("position 200")
        super().append(seqs, key, value)


class ShortAsStated(Short):
    most_tokens = 200


class SmallPool(Cache):
    """A cache that cannot be built with many blocks."""

    def make(self, spec: CacheSpec) -> None:
        if spec.num_blocks > 100:
            raise ValueError("at most 100 blocks")
        super().make(spec)


@pytest.mark.many_alike
@pytest.mark.parametrize(
    ("adapter", "what"),
    [
        (Slots, "the write raised IndexError: no slot left"),
        (Short, "the write raised IndexError: position 200"),
        (SmallPool, "blocks raised ValueError: at most 100 blocks"),
    ],
)
def test_a_cache_that_is_not_made_for_so_many_is_told_how_to_say_so(
    monkeypatch: pytest.MonkeyPatch, adapter: type[Cache], what: str
) -> None:
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 0.5)
    with pytest.raises(Difference) as caught:
        search(adapter)
    assert what in caught.value.what
    (hint,) = (
        each for each in caught.value.extra_paragraphs if each.startswith("This is a large history")
    )
    assert f"If {adapter.__name__} does not support that" in hint
    assert "most_sequences, most_tokens" in hint


@pytest.mark.many_alike
@pytest.mark.parametrize(
    ("adapter", "largest"),
    [
        (SlotsThatAreStated, "largest: 16 rows, 130 blocks, 518 tokens"),
        (ShortAsStated, "largest: 70 rows, 50 blocks, 198 tokens"),
    ],
)
def test_one_that_says_so_gets_histories_as_large_as_that(
    adapter: type[Cache], largest: str
) -> None:
    search(adapter)
    assert TargetVerdict(current().of(adapter)).sizes == largest


@pytest.mark.parametrize("block_size", [1, 4, 256])
@pytest.mark.parametrize("most", [6, 16, 20, 40, 66, 70])
def test_whatever_is_stated_every_step_makes_sense(block_size: int, most: int) -> None:
    class Bounded(Cache):
        block_sizes = (block_size,)
        most_sequences = most
        most_tokens = 4 * most

    for history in large_histories(Bounded, {}, "cpu"):
        oracle = Oracle.of(Bounded, history.spec)
        for step in history.operations:
            assert step.possible(oracle)
            assert step.fits(oracle)
            step.apply(oracle)
            assert len(oracle.sequences) <= most
            assert max(map(oracle.length, oracle.sequences)) <= 4 * most


def test_what_large_histories_reach_does_not_count() -> None:
    class Counted(Cache):
        conditions = ("many",)

        def make(self, spec: CacheSpec) -> None:
            super().make(spec)
            self.many = 0

        def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
            self.many += len(seqs) > 8
            super().append(seqs, key, value)

        def path_counts(self) -> dict[str, int]:
            return {"many": self.many}

    settings.set_current(replace(settings.current(), require_paths=False))
    search(Counted)
    assert current().of(Counted).counts["many"] == 0


@pytest.mark.parametrize(("name", "said"), [("most_sequences", 4), ("most_tokens", "many")])
def test_a_bound_that_makes_no_sense_is_refused(name: str, said: object) -> None:
    adapter = type("Bounded", (Cache,), {name: said})
    with pytest.raises(TypeError, match=rf"Bounded\.{name} is {said!r}: write a number of"):
        conformance(adapter)
