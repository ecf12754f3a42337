"""The road from a test that comes with the plugin to what it finds wrong is short."""

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
from tests.engine_capabilities.engines.broken_engines import ANeighboursTokenLeaksIn

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
    """The same with prefixes."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, -key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().prefill(seq, -key, value)


def road(test: Callable[[], None]) -> list[str]:
    """Return the files of both packages that are entered up to the first failing assertion."""
    files: dict[str, None] = {}
    ends = Divergence.__init__.__code__, MixDivergence.__init__.__code__

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files[frame.f_code.co_filename] = None
        elif event == "return" and frame.f_code in ends:
            sys.setprofile(None)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with pytest.raises((Divergence, MixDivergence)):
            test()
    finally:
        sys.setprofile(before)
    found = [(Path(file), root) for file in files for root in PACKAGES]
    return [str(file.relative_to(root.parent)) for file, root in found if file.is_relative_to(root)]


@pytest.mark.parametrize(
    ("adapter", "test", "most"),
    [
        (Negates, "test_histories", 16),
        (NegatesTexts, "test_histories", 25),
        (ANeighboursTokenLeaksIn, "test_requests_get_what_they_get_alone", 16),
    ],
    ids=["cache", "cache with prefixes", "engine"],
)
def test_few_files_lead_to_a_failing_assertion(
    adapter: type[KVCacheAdapter | EngineAdapter], test: str, most: int
) -> None:
    asked, seen = settings.current(), coverage.current()
    try:
        settings.set_current(settings.Settings(examples=5, seed=1))
        for _ in range(2):  # the first time, modules are imported on the way
            coverage.set_current(coverage.Coverage())
            entered = road(getattr(conformance(adapter)(), test))
    finally:
        settings.set_current(asked)
        coverage.set_current(seen)
    print("\n".join(entered))
    assert len(entered) <= most
