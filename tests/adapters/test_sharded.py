"""Sharded caches behave like one cache, and ranks that differ fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    ShardedAdapter,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from tests.capabilities.caches import sharded_caches
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.reusing_caches import ReusesHandles

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter


class RoseinferRanks(ShardedAdapter):
    of = GroupedManager
    head_counts = (2, 4)
    head_dims = (4, 1)
    block_sizes = (4, 2)


def search(
    adapter: type[KVCacheAdapter], examples: int, seed_number: int, device: str = "cpu"
) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(seed_number)
    @given(histories(adapter, device=device))
    def check(history: History) -> None:
        run_history(adapter, history)

    check()


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", sharded_caches.RIGHT)
def test_equal_ranks_pass(cache: type[KVCacheAdapter]) -> None:
    settings.set_current(settings.Settings(examples=4, steps=10, seed=1))
    conformance(cache)().test_histories()


def test_roseinfer_on_two_ranks_passes(device: str) -> None:
    search(RoseinferRanks, 6, seed_number=1, device=device)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize("broken", sharded_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_differing_ranks_fail(broken: type[ShardedAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence) as failure:
        search(broken, 500, seed_number)
    assert sharded_caches.BROKEN[broken] in failure.value.summary


def test_rank_gets_its_heads() -> None:
    cache = sharded_caches.TextRanks()
    assert cache.head_counts == (3, 6, 9, 120)
    cache.make(CacheSpec(num_heads=6, head_dim=1))
    key = torch.arange(6.0).view(1, 1, 6, 1)
    cache.use_tokens([[1]])
    cache.append([0], key, -key)
    rank_keys = [rank.peek(0, 0)[0].flatten().tolist() for rank in cache.shards()]
    assert rank_keys == [[0, 1], [2, 3], [4, 5]]
    keys, values = cache.peek(0, 0)
    assert torch.equal(keys, key[0])
    assert torch.equal(values, -key[0])


def test_sharded_adapter_offers_the_methods_of_its_ranks() -> None:
    assert sharded_caches.PagedRanks.abilities == PagedCache.abilities | {"shards"}
    assert sharded_caches.PagedRanks.paths is PagedCache.paths
    missing = GroupedManager.abilities - RoseinferRanks.abilities
    assert missing == {
        "append_to_blocks",
        "bad_calls",
        "decref_blocks",
        "gather_blocks",
        "incref_blocks",
    }
    assert RoseinferRanks.standard_bad_calls == ()


def test_reservation_combines_the_handles_of_all_ranks() -> None:
    class Ranks(ShardedAdapter):
        of = ReusesHandles

    assert Ranks.conditions == ["new_block"]
    cache = Ranks()
    cache.make(CacheSpec(num_heads=2))
    key = torch.ones(1, 2, 2, 4)
    cache.fill(cache.reserve([0], [2]), key, -key)
    assert torch.equal(cache.peek(0, 0)[1], -key[0])


def test_ranks_must_refuse_together() -> None:
    spec = CacheSpec(num_heads=2, num_blocks=2, block_size=1)
    run_history(sharded_caches.PagedRanks, History(spec, (Append((0, 1)), Append((2,)))))
    with pytest.raises(Divergence, match="RankMismatch: rank 1 raised CacheFull: no"):
        run_history(sharded_caches.RefusesAlone, History(spec, (Append((0, 1)),)))


def test_own_attributes_of_a_sharded_adapter_are_kept() -> None:
    assert RoseinferRanks.head_counts == (2, 4)
    assert sharded_caches.RefusesAlone.head_dims == sharded_caches.PagedRanks.head_dims == (4, 1)
    attributes = {"of": PagedCache, "ranks": 3, "head_counts": (3, 4)}
    with pytest.raises(TypeError, match=r"Ranks.head_counts must be multiples of its 3 ranks"):
        type("Ranks", (ShardedAdapter,), attributes)


def test_sharded_adapter_must_name_the_adapter_of_a_rank() -> None:
    with pytest.raises(TypeError, match=r"Ranks.of must name the adapter of one rank's cache"):
        type("Ranks", (ShardedAdapter,), {})
