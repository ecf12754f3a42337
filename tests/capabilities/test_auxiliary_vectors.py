"""Auxiliary vectors, such as indexer keys: they move with the keys and values of their tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    AuxiliaryVector,
    CacheSpec,
    Divergence,
    History,
    conformance,
    run_history,
)
from pytest_roseinfer.capabilities.forks import Copy
from pytest_roseinfer.capabilities.writes import Append, AppendPadded
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches import broken_index_caches, index_cache, moved_scale_caches
from tests.capabilities.caches.broken_index_caches import (
    IndexesLayersAsOne,
    IndexesOnTheFirstRank,
    IndexesPaddingRows,
    KeepsFormerScales,
    KeepsTheVectorsOfAWrite,
)
from tests.capabilities.caches.index_cache import KEY, SCALE, IndexedCache, QuantisedIndex
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation


def search(cache: type[KVCacheAdapter], examples: int, max_steps: int = 12) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(1)
    @given(histories(cache, max_steps=max_steps))
    def check(history: History) -> None:
        run_history(cache, history)

    check()


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "cache", [*index_cache.RIGHT, *moved_scale_caches.RIGHT], ids=lambda cache: cache.__name__
)
def test_cache_that_moves_vectors_or_scales_passes(cache: type[KVCacheAdapter]) -> None:
    search(cache, examples=6, max_steps=10)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("cache", broken_index_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_cache_that_leaves_vectors_behind_fails(cache: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence, match=r"peek_auxiliary_vectors: sequence .*, indexer "):
        search(cache, examples=500)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("cache", moved_scale_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_cache_that_leaves_scales_behind_fails(cache: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence, match="peek: sequence"):
        search(cache, examples=500)


SPEC = CacheSpec(num_layers=2, num_heads=1, head_dim=4, block_size=2)


def failure_of(cache: type[KVCacheAdapter], *steps: Operation) -> str:
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(SPEC, steps))
    return failure.value.summary


class OneOff(IndexedCache):
    def use_auxiliary_vectors(self, vectors: Mapping[str, torch.Tensor]) -> None:
        super().use_auxiliary_vectors({name: each.roll(1, 1) for name, each in vectors.items()})


class Raises(IndexedCache):
    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        raise KeyError(seq, layer)


class Narrow(IndexedCache):
    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        return {
            name: each[:, :1] for name, each in super().peek_auxiliary_vectors(seq, layer).items()
        }


class Wide(IndexedCache):
    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        vectors = super().peek_auxiliary_vectors(seq, layer)
        return {**vectors, SCALE: vectors[SCALE].double()}


class WithoutScales(IndexedCache):
    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        return {KEY: super().peek_auxiliary_vectors(seq, layer)[KEY]}


class TwoOfAKind(IndexedCache):
    """Has two kinds of vectors of one shape, and returns one for the other."""

    auxiliary_vectors: ClassVar = {"first": AuxiliaryVector(4), "second": AuxiliaryVector(4)}

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.index = index_cache.new_index(spec, spec.num_blocks, self.auxiliary_vectors)

    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        return dict.fromkeys(
            self.auxiliary_vectors, super().peek_auxiliary_vectors(seq, layer)["first"]
        )


TWO = (Append((0,)), Append((0, 1)))


@pytest.mark.parametrize(
    ("cache", "steps", "found"),
    [
        (
            KeepsTheVectorsOfAWrite,
            TWO,
            "sequence 0, layer 0, indexer key: position 0 (1 of 1 wrong): expected that of "
            "sequence 0, token 0, found bits no token has ([255, 255, 255, 255]...)",
        ),
        (OneOff, (Append((0, 1)),), "found that of sequence 1, token 0"),
        (IndexesLayersAsOne, TWO, "found that of sequence 0, token 0, layer 1: another layer's"),
        (IndexesPaddingRows, (AppendPadded((None, 0)),), "found that of padding row 0"),
        (IndexesOnTheFirstRank, TWO, "rank 1: peek_auxiliary_vectors: sequence 0, layer 0"),
        (Raises, TWO, "peek_auxiliary_vectors(0, 0) raised KeyError: (0, 0)"),
        (Narrow, TWO, "indexer key: expected shape [1, 6], found [1, 1]"),
        (Wide, TWO, "indexer scale: expected dtype torch.float32, found torch.float64"),
        (
            WithoutScales,
            TWO,
            "a dict of tensors [tokens, width] for 'indexer key', 'indexer scale'",
        ),
        (
            TwoOfAKind,
            TWO,
            "second: position 0 (1 of 1 wrong): expected that of sequence 0, token 0, found its "
            "first",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_failure_names_the_vector_that_was_found(
    cache: type[KVCacheAdapter], steps: tuple[Operation, ...], found: str
) -> None:
    spec = SPEC if cache is not IndexesOnTheFirstRank else CacheSpec(num_heads=2, block_size=2)
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(spec, steps))
    assert found in failure.value.summary


def test_neighbouring_token_is_named() -> None:
    class Late(IndexedCache):
        def write_index(self, block: int, position: int) -> None:
            super().write_index(block, position)
            if position:
                for stored in self.index.values():
                    stored[:, block, position] = stored[:, block, position - 1]

    assert "found that of sequence 0, token 0: one position off" in failure_of(
        Late, Append((0,)), Append((0,))
    )


def test_wrong_scale_of_a_quantised_vector_is_named() -> None:
    class Doubles(QuantisedIndex):
        def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
            return {KEY: super().peek_auxiliary_vectors(seq, layer)[KEY] * 2}

    run_history(QuantisedIndex, History(SPEC, TWO))
    assert "found 2.002 times that, up to" in failure_of(Doubles, *TWO)


def test_former_scale_is_named() -> None:
    from pytest_roseinfer.capabilities.freeing import Free

    steps = (Append((0,)), Free(0), Append((1,)))
    failure = failure_of(KeepsFormerScales, *steps)
    assert "indexer scale: position 0 (1 of 1 wrong): expected that of sequence 1" in failure
    assert failure.endswith("found that of sequence 0, token 0")


def test_write_in_parts_gets_the_vectors_of_each_part() -> None:
    """A copy is written token by token where the cache has no ``prefill``."""

    class FirstRowOnly(IndexedCache):
        def write_index(self, block: int, position: int) -> None:
            self.row = 0
            super().write_index(block, position)

    steps = (Append((0,)), Append((0,)), Append((0,)), Copy(0, 1, 3))
    run_history(FirstRowOnly, History(SPEC, steps))
    assert "prefill" not in IndexedCache.abilities


def test_cache_without_vectors_is_not_checked() -> None:
    machine = HistoryRunner(CutCache, History(SPEC, TWO))
    machine.run()
    assert machine.invariant_checks["auxiliary_vectors"] == 0
    assert not machine.snapshot.auxiliary_vectors


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"auxiliary_vectors": {}}, "name the vectors in auxiliary_vectors"),
        ({"auxiliary_vectors": {KEY: 128}}, "write AuxiliaryVector(128)"),
        ({"auxiliary_vectors": {KEY: AuxiliaryVector(0)}}, "width lies between 1 and"),
        ({"auxiliary_vectors": {KEY: AuxiliaryVector(4, "int65")}}, "dtype is the name of a torch"),
        ({"auxiliary_vectors": {KEY: AuxiliaryVector(4, of_greatest=0.5)}}, "of_greatest between"),
    ],
)
def test_invalid_vectors_are_refused(attributes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        conformance(type("Wrong", (IndexedCache,), dict(attributes)))


def test_declared_vectors_need_their_methods() -> None:
    with pytest.raises(TypeError, match=re.escape("needs use_auxiliary_vectors()")):
        conformance(type("Wrong", (CutCache,), {"auxiliary_vectors": index_cache.VECTORS}))
