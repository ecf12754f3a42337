"""vLLM's block manager on kvcached's block pool, and the documented findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import Divergence, conformance, settings
from tests.fresh_run import fresh_run
from tests.others.kvcached_vllm import (
    CappedElasticAdapter,
    ElasticVllmAdapter,
    FreesRefusedRequests,
    ResetsWhileRunning,
    SharesTheGpu,
    WindowsElasticAdapter,
)
from tests.others.needs import needs
from tests.others.vllm_sources import searches_vllm

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

PROJECT = "kvcached"

pytestmark = [*needs(PROJECT), *searches_vllm]


@pytest.mark.parametrize(
    "adapter", [ElasticVllmAdapter, CappedElasticAdapter, WindowsElasticAdapter]
)
def test_block_pool_conforms(adapter: type[KVCacheAdapter]) -> None:
    with fresh_run(settings.Settings(examples=100, steps=12, seed=1)):
        conformance(adapter)().test_histories()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (ResetsWhileRunning, "found 2, and only 0 of them may be found now"),
        (SharesTheGpu, "block 2 has refcount 2, and tables name it 1 time"),
        (FreesRefusedRequests, "the write raised ValueError: Cannot get 3 free blocks"),
    ],
)
def test_search_finds_the_documented_finding(adapter: type[KVCacheAdapter], message: str) -> None:
    with (
        fresh_run(settings.Settings(examples=100, steps=20, seed=1)),
        pytest.raises(Divergence, match=message),
    ):
        conformance(adapter)().test_histories()
