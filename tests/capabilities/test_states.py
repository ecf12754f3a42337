"""States of recurrent layers: they follow all tokens, and are found with their prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, conformance, run_history
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.states import StateNumbers
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.run import coverage
from tests.capabilities.caches import grouped_state_caches
from tests.capabilities.caches.broken_state_caches import BROKEN, SharesTheStateOfAFork
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.state_cache import StateCache
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter


def search(cache: type[KVCacheAdapter], seed_number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(seed_number)
    @given(histories(cache))
    def check(history: History) -> None:
        run_history(cache, history)

    check()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize("cache", BROKEN, ids=lambda cache: cache.__name__)
def test_cache_with_wrong_states_fails(cache: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence) as failure:
        search(cache, seed_number, examples=1000)
    assert "peek_state: sequence" in failure.value.summary


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(2))
@pytest.mark.parametrize("cache", grouped_state_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_cache_whose_groups_disagree_fails(cache: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        search(cache, seed_number, examples=1000)


@few_or_many_examples(30, 150)
@pytest.mark.parametrize("cache", [StateCache, grouped_state_caches.RIGHT])
def test_cache_with_right_states_passes(cache: type[KVCacheAdapter], examples: int) -> None:
    search(cache, 1, examples)


def test_reused_state_is_required() -> None:
    assert "state_reused" in coverage.Coverage().of(StateCache).conditions
    assert "state_reused" not in coverage.Coverage().of(ListCache).conditions


def failure_of(cache: type[KVCacheAdapter], *steps: Append | Fork) -> str:
    spec = CacheSpec(num_layers=2, num_heads=1, head_dim=4, block_size=2)
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(spec, steps, texts=((0, 0), (0, 9))))
    return failure.value.summary


def test_failure_names_the_state_that_was_found() -> None:
    steps = Append((0,)), Append((0,)), Fork(0, 2), Append((0,))
    assert failure_of(SharesTheStateOfAFork, *steps) == (
        "peek_state: sequence 2, layer 0: expected the state after all of its 2 tokens, found "
        "that of sequence 0 after its first 3"
    )


class Stale(StateCache):
    def update_state(self, seq: int, first: int, token: int, count: int) -> None:
        if len(self.stored[seq].ids) < 3:
            super().update_state(seq, first, token, count)


class LayersSwapped(StateCache):
    def peek_state(self, seq: int) -> torch.Tensor:
        return super().peek_state(seq).flip(0)


class Zeros(StateCache):
    def peek_state(self, seq: int) -> torch.Tensor:
        return torch.zeros_like(super().peek_state(seq))


class KeepsItsInput(StateCache):
    def update_state(self, seq: int, first: int, token: int, count: int) -> None:  # noqa: ARG002
        self.stored[seq].state = self.new_states[:, first + token]


class Narrow(StateCache):
    def peek_state(self, seq: int) -> torch.Tensor:
        return super().peek_state(seq)[..., :3]


@pytest.mark.parametrize(
    ("cache", "found"),
    [
        (Stale, "found that after the first 2"),
        (LayersSwapped, "found that after the first 1, of layer 1"),
        (Zeros, "found zeros"),
        (KeepsItsInput, "found NaN"),
        (Narrow, "peek_state(0) returned a tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_failure_describes_a_wrong_state(cache: type[KVCacheAdapter], found: str) -> None:
    assert found in failure_of(cache, Append((0,)), Append((0,)), Append((0,)))


def test_states_need_both_methods() -> None:
    class Half(ListCache):
        def use_states(self, states: torch.Tensor) -> None:
            pass

    with pytest.raises(TypeError, match="peek_state"):
        conformance(Half)


def test_equal_prefixes_have_equal_states() -> None:
    numbers = StateNumbers()
    one, other = numbers.after_each([5, 6, 7]), numbers.after_each([5, 6, 8])
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert numbers.after([5, 6]) == one[1]
    assert numbers.after([]) == 0
    assert numbers.has_prefix(other[2], one[1])
    assert not numbers.has_prefix(other[2], one[2])
