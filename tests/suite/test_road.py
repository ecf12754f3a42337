"""The number of files between a shipped test and its failing assertion is small."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_roseinfer
import roseinfer
from pytest_roseinfer import (
    Divergence,
    EngineAdapter,
    KVCacheAdapter,
    MixDivergence,
    conformance,
    settings,
)
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.text_cache import TextCache
from tests.engine_capabilities.engines.broken_engines import ReturnsANeighboursToken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    import torch

PACKAGES = [Path(package.__path__[0]) for package in (pytest_roseinfer, roseinfer)]


class Negates(ListCache):
    """A small cache that is wrong from its first token on."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, -key, value)


class NegatesTexts(TextCache):
    """The same with prefix reuse."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, -key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().prefill(seq, -key, value)


def files_entered(test: Callable[[], None]) -> list[str]:
    """Return the files of both packages that are entered before the first failing assertion."""
    files: dict[str, None] = {}
    end_of_call = Divergence.__init__.__code__, MixDivergence.__init__.__code__

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files[frame.f_code.co_filename] = None
        elif event == "return" and frame.f_code in end_of_call:
            sys.setprofile(None)

    previous_profiler = sys.getprofile()
    sys.setprofile(record)
    try:
        with pytest.raises((Divergence, MixDivergence)):
            test()
    finally:
        sys.setprofile(previous_profiler)
    paths = [(Path(file), root) for file in files for root in PACKAGES]
    return [str(file.relative_to(root.parent)) for file, root in paths if file.is_relative_to(root)]


@pytest.mark.parametrize(
    ("adapter", "test", "max_files"),
    [
        (Negates, "test_histories", 16),
        (NegatesTexts, "test_histories", 25),
        (ReturnsANeighboursToken, "test_requests_get_what_they_get_alone", 23),
    ],
    ids=["cache", "cache with prefixes", "engine"],
)
def test_failing_assertion_is_reached_through_few_files(
    adapter: type[KVCacheAdapter | EngineAdapter], test: str, max_files: int
) -> None:
    previous_settings, previous_coverage = settings.current(), coverage.current()
    try:
        settings.set_current(settings.Settings(examples=5, seed=1))
        for _ in range(2):  # the first time, modules are imported too
            coverage.set_current(coverage.Coverage())
            files = files_entered(getattr(conformance(adapter)(), test))
    finally:
        settings.set_current(previous_settings)
        coverage.set_current(previous_coverage)
    print("\n".join(files))
    assert len(files) <= max_files
