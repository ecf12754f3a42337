"""A lost GPU context is reported with the steps that caused it, and without shrinking."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pytest_roseinfer import Divergence, conformance, settings
from pytest_roseinfer.search import search
from pytest_roseinfer.search.search import GpuLostError, gpu_is_lost
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.test_truncation import short_run as short_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer import CacheSpec


class Gpu:
    lost = False


class BreaksTheContext(ListCache):
    """Loses the context with a batch of two sequences; then not even a new cache can be built."""

    def make(self, spec: CacheSpec) -> None:
        if Gpu.lost:
            raise RuntimeError("CUDA error: misaligned address")
        super().make(spec)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len(seqs) > 1:
            Gpu.lost = True
            raise RuntimeError("CUDA error: misaligned address")
        super().append(seqs, key, value)


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(search, "gpu_is_lost", lambda: Gpu.lost)
    Gpu.lost = False
    yield
    Gpu.lost = False


@pytest.mark.usefixtures("short_run", "simulated_gpu")
def test_history_that_lost_the_context_is_reported_unchanged() -> None:
    settings.set_current(settings.Settings(examples=50, steps=12, seed=1))
    tests = conformance(BreaksTheContext)()
    with pytest.raises(Divergence, match="raised RuntimeError: CUDA error") as caught:
        tests.test_histories()
    assert "the GPU's context is lost" in str(caught.value)
    assert "CUDA_LAUNCH_BLOCKING=1" in str(caught.value)
    assert "append one token to sequences" in caught.value.history.describe().splitlines()[-1]
    with pytest.raises(GpuLostError, match="run this one in another process"):
        tests.test_permuting_a_batch_permutes_the_result()


def test_context_with_a_failing_synchronise_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert gpu_is_lost()
