"""Caches on another GPU than the current one."""

from __future__ import annotations

import pytest
import torch

from roseinfer import BadArgument, Condition, Path
from roseinfer.kernels.triton.clone import kv_clone_triton
from tests.kernels.triton.append_calls import (
    CACHE_SHAPE,
    KERNELS,
    Caches,
    assert_appends,
    index,
    new_tokens,
)
from tests.kv.test_write_paths import WRITES
from tests.kv.twins import Snapshot, Twins

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: the current one and another"
)
SECOND = "cuda:1"


@pytest.mark.parametrize("path", WRITES)
def test_write_paths_on_the_second_gpu(path: Path) -> None:
    case = WRITES[path]
    twins = Twins(SECOND, case.policy, lengths=case.lengths)
    assert twins.append()[path] == case.times
    twins.check()
    assert torch.cuda.current_device() == 0


def test_copy_on_write_on_the_second_gpu() -> None:
    twins = Twins(SECOND, lengths=(2, 3))
    twins.fork(0)
    assert twins.append()[Condition.COPY_ON_WRITE] == 1
    twins.check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_append_kernels_on_the_second_gpu(kernel: str) -> None:
    """A kernel compiled for one GPU is not launched on the other."""
    for device in ("cuda:0", SECOND, "cuda:0"):
        caches = Caches.build(device, CACHE_SHAPE)
        assert_appends(kernel, caches, new_tokens(caches))


def test_clone_kernel_on_the_second_gpu() -> None:
    caches = Caches.build(SECOND, (2, *CACHE_SHAPE))
    expected = caches.copy()
    for cache in expected.pair:
        cache[:, 4] = cache[:, 1]
    keys, values = caches.pair
    where = {"source": index((1,), SECOND), "target": index((4,), SECOND)}
    kv_clone_triton(k_cache=keys, v_cache=values, **where)
    caches.assert_same(expected)


def test_tokens_on_the_current_gpu_are_rejected() -> None:
    twins = Twins(SECOND, lengths=(1,))
    key = twins.token(1).to("cuda:0")
    before = Snapshot.of(twins.fast)
    with pytest.raises(BadArgument, match="the cache is on cuda:1; key is on cuda:0"):
        twins.fast.append_token_batch(twins.layer, twins.fast_lists, key, key)
    before.assert_unchanged(twins.fast)
