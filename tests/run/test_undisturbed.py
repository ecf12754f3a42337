"""Isolated runs: CPython's and torch's settings do not slow a search, and are restored."""

from __future__ import annotations

import gc
import resource
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_roseinfer.search.search import run_isolated

if TYPE_CHECKING:
    from collections.abc import Callable

DEPTHS, CALLS = 250, 400


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def call_at_depth(depth: int, work: Callable[[], None]) -> None:
    if depth:
        call_at_depth(depth - 1, work)
    else:
        work()


def call_often() -> None:
    def nothing() -> None: ...

    for _ in range(CALLS):
        nothing()


def test_calls_at_any_depth_map_no_memory_each() -> None:
    """So many depths exceed a stack chunk, so that a call at one of them begins the next."""

    def work() -> None:
        for depth in range(DEPTHS):
            call_at_depth(depth, call_often)

    def count_faults() -> None:
        before = page_faults()
        work()
        faults.append(page_faults() - before)

    faults: list[int] = []
    run_isolated(count_faults)
    assert faults[0] < CALLS / 2


def test_threads_and_garbage_collection_are_limited_and_restored() -> None:
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    inside: list[object] = []

    def record() -> None:
        inside.extend([torch.get_num_threads(), gc.get_threshold()[0] > thresholds[0]])
        raise KeyError

    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError):
            run_isolated(record)
        assert inside == [1, True]
        assert (torch.get_num_threads(), gc.get_threshold()) == (3, thresholds)
    finally:
        torch.set_num_threads(threads)
