"""Large histories: they find bugs that need many rows, long tables or long contexts."""

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
    """The cache of the tutorial, with attention."""

    full_errors = (CacheFull, NoBlocks)
    wrong_from = 0
    """First row whose keys are those of row 0; 0 for none."""
    max_blocks = 0
    """Number of entries of a table that are read; 0 for all."""
    left_out: int | None = None
    """Token that attention leaves out; None for none."""

    def make(self, spec: CacheSpec) -> None:
        dtype = getattr(torch, spec.dtype)
        sizes = spec.num_layers, spec.num_blocks, spec.block_size, spec.num_heads, spec.head_dim
        self.kv, self.seqs = PagedKV(*sizes, dtype), dict[int, Seq]()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if self.wrong_from and len(seqs) > self.wrong_from:
            at = self.wrong_from
            key = torch.cat([key[:, :at], key[:, :1].expand(-1, len(seqs) - at, -1, -1)], 1)
        sequences = [self.seqs.get(seq) or Seq() for seq in seqs]
        self.kv.extend(sequences, key, value)
        self.seqs.update(zip(seqs, sequences, strict=True))

    def fork(self, parent: int, child: int) -> None:
        self.seqs[child] = self.kv.fork(self.seqs[parent])

    def free(self, seq: int) -> None:
        self.kv.drop(self.seqs.pop(seq))

    def peek(self, seq: int, layer: int) -> Pair:
        return self.kv.read(self.seqs[seq], layer)

    def gather(self, seq: int, layer: int) -> Pair:
        keys, values = self.peek(seq, layer)
        num_tokens = self.max_blocks * self.kv.size
        if num_tokens and len(keys) > num_tokens:
            keys = torch.cat([keys[:num_tokens], keys[: len(keys) - num_tokens]])
        return keys, values

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        outputs = []
        for row, seq in enumerate(seqs):
            keys, values = (each.double() for each in self.peek(seq, layer))
            if self.left_out is not None:
                attended = torch.arange(len(keys)) != self.left_out
                keys, values = keys[attended], values[attended]
            each = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(each, 1), values.repeat_interleave(each, 1)
            scores = (query[row].double() * keys).sum(-1) * query.shape[-1] ** -0.5
            outputs.append((torch.softmax(scores, 0)[..., None] * values).sum(0))
        return torch.stack(outputs).to(query.dtype)


class WrongFromRow9(Cache):
    wrong_from = 8


class WrongFromRow65(Cache):
    wrong_from = 64


class WrongFromRow86(Cache):
    wrong_from = 85


class WrongFromRow129(Cache):
    wrong_from = 128


class ShortTable(Cache):
    max_blocks = 32


class DropsToken256(Cache):
    left_out = 256


class OmitsRow65(Cache):
    """Attends with the first 64 rows only."""

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        outputs = super().attend(seqs, query, layer)
        outputs[64:] = 0
        return outputs


@pytest.fixture(autouse=True)
def _profile_dev(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 4.0)
    with fresh_run(settings.Settings(seed=1, failures_dir=None)):
        yield


def search(adapter: type[KVCacheAdapter]) -> None:
    tests: Any = conformance(adapter)()
    tests.test_histories()


@pytest.mark.slow
def test_right_cache_passes_and_the_largest_sizes_are_reported() -> None:
    search(Cache)
    target = current().of(Cache)
    assert TargetVerdict(target).sizes == "largest: 130 rows, 130 blocks, 518 tokens"
    assert target.histories == settings.current().examples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "min_rows"),
    [(WrongFromRow9, 9), (WrongFromRow65, 65), (WrongFromRow86, 86), (WrongFromRow129, 129)],
)
def test_wrong_rows_are_found_with_a_small_history(adapter: type[Cache], min_rows: int) -> None:
    with pytest.raises(Divergence) as caught:
        search(adapter)
    (step,) = caught.value.history.operations
    assert min_rows <= len(step.rows()) <= 130


@pytest.mark.sampled_cases
@pytest.mark.parametrize("adapter", [ShortTable, DropsToken256, OmitsRow65])
def test_bug_of_long_tables_contexts_or_many_rows_is_found(
    monkeypatch: pytest.MonkeyPatch, adapter: type[Cache]
) -> None:
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 0.5)
    with pytest.raises(Divergence):
        search(adapter)


@pytest.mark.slow
def test_large_histories_of_a_slow_cache_are_cut_short(
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
    sizes = TargetVerdict(current().of(Slow)).sizes
    assert sizes.startswith("largest: 129 rows")
    assert sizes.endswith("(large histories cut short: 3, for lack of time)")


def test_rows_after_the_64th_meet_every_condition() -> None:
    history = next(large_histories(Cache, {}, "cpu"))
    oracle = Oracle.of(Cache, history.spec)
    conditions: set[str] = set()
    for step in history.operations:
        assert step.fits(oracle)
        conditions.update(oracle.conditions_met(step.rows())[64:])
        step.apply(oracle)
    assert conditions == {"fresh", "in_place", "rollover", "rollover_shared", "copy_on_write"}


class Slots(Cache):
    """A cache for 16 sequences, each of which has a slot."""

    slots = 16

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len({*self.seqs, *seqs}) > self.slots:
            raise IndexError("no slot left")
        super().append(seqs, key, value)

    def fork(self, parent: int, child: int) -> None:
        if len(self.seqs) >= self.slots:
            raise IndexError("no slot left")
        super().fork(parent, child)


class DeclaresSlots(Slots):
    max_sequences = 16


class Short(Cache):
    """A cache whose sequences have room for 200 tokens."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if any(seq in self.seqs and self.seqs[seq].length >= 200 for seq in seqs):
            raise IndexError("position 200")
        super().append(seqs, key, value)


class DeclaresShort(Short):
    max_tokens = 200


class SmallPool(Cache):
    """A cache that cannot be built with many blocks."""

    def make(self, spec: CacheSpec) -> None:
        if spec.num_blocks > 100:
            raise ValueError("at most 100 blocks")
        super().make(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "what"),
    [
        (Slots, "the write raised IndexError: no slot left"),
        (Short, "the write raised IndexError: position 200"),
        (SmallPool, "blocks raised ValueError: at most 100 blocks"),
    ],
)
def test_failing_large_history_suggests_declaring_limits(
    monkeypatch: pytest.MonkeyPatch, adapter: type[Cache], what: str
) -> None:
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 0.5)
    with pytest.raises(Difference) as caught:
        search(adapter)
    assert what in caught.value.summary
    (hint,) = (
        each for each in caught.value.extra_paragraphs if each.startswith("This is a large history")
    )
    assert f"If {adapter.__name__} does not support that" in hint
    assert "max_sequences, max_tokens" in hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "largest"),
    [
        (DeclaresSlots, "largest: 16 rows, 130 blocks, 518 tokens"),
        (DeclaresShort, "largest: 130 rows, 50 blocks, 198 tokens"),
    ],
)
def test_large_histories_keep_to_declared_limits(adapter: type[Cache], largest: str) -> None:
    search(adapter)
    assert TargetVerdict(current().of(adapter)).sizes == largest


@pytest.mark.sampled_cases
@pytest.mark.parametrize("block_size", [1, 4, 256])
@pytest.mark.parametrize("limit", [6, 16, 20, 40, 66, 70, 72, 100, 200])
def test_steps_of_large_histories_are_valid_with_any_limits(block_size: int, limit: int) -> None:
    class Bounded(Cache):
        block_sizes = (block_size,)
        max_sequences = limit
        max_tokens = 4 * limit

    for history in large_histories(Bounded, {}, "cpu"):
        oracle = Oracle.of(Bounded, history.spec)
        for step in history.operations:
            assert step.possible(oracle)
            assert step.fits(oracle)
            step.apply(oracle)
            assert len(oracle.sequences) <= limit
            assert max(map(oracle.length, oracle.sequences)) <= 4 * limit


@pytest.mark.slow
def test_conditions_of_large_histories_are_not_counted() -> None:
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


@pytest.mark.parametrize(("name", "limit"), [("max_sequences", 4), ("max_tokens", "many")])
def test_invalid_limit_is_refused(name: str, limit: object) -> None:
    adapter = type("Bounded", (Cache,), {name: limit})
    with pytest.raises(TypeError, match=rf"Bounded\.{name} is {limit!r}: write a number of"):
        conformance(adapter)
