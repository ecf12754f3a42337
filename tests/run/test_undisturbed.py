"""What CPython and torch do by themselves does not slow a search, and goes on after it."""

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


def test_no_depth_of_calls_maps_memory_for_every_call() -> None:
    """So many depths are more than fit a chunk: at one of them a call is the first in the next."""

    def work() -> None:
        for depth in range(DEPTHS):
            call_at_depth(depth, call_often)

    def counted() -> None:
        before = page_faults()
        work()
        faults.append(page_faults() - before)

    faults: list[int] = []
    run_isolated(counted)
    assert faults[0] < CALLS / 2


def test_threads_and_collections_are_few_inside_and_as_they_were_after() -> None:
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    inside: list[object] = []

    def look() -> None:
        inside.extend([torch.get_num_threads(), gc.get_threshold()[0] > thresholds[0]])
        raise KeyError

    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError):
            run_isolated(look)
        assert inside == [1, True]
        assert (torch.get_num_threads(), gc.get_threshold()) == (3, thresholds)
    finally:
        torch.set_num_threads(threads)
