"""Growth of the memory that Python allocates in a step, from short contexts to long ones.

A step that copies a list of all tokens makes no more calls for a longer context, so counts of calls
miss it. The bytes that it allocates grow: they are compared at two lengths, without a baseline.
"""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.step_work import restore_profiler
from roseinfer._plugin import gc_disabled

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_RUNS = 3
"""Steps at each length. The one that allocates least counts, since now and then a list that grows
with the context is enlarged."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that Python allocates in a step, in contexts of two lengths."""

    short: int
    long: int
    added_tokens: int
    """Tokens by which each context is longer."""
    function: str
    """Function in which the step in long contexts allocates most."""

    @property
    def per_token(self) -> float:
        return (self.long - self.short) / self.added_tokens

    def describe(self) -> str:
        return (
            f"Python allocates {self.long:,} bytes in a step, and {self.short:,} where each "
            f"context is {self.added_tokens} tokens shorter: {self.per_token:.1f} bytes more for "
            f"each token, most of them in {self.function}"
        )


def measure_growth(
    step: Callable[[], object],
    shorten: Callable[[], object],
    lengthen: Callable[[], object],
    added_tokens: int,
) -> Growth:
    """Measure steps after ``shorten``, and after ``lengthen``, which adds tokens to contexts."""
    for prepare in (shorten, lengthen):  # what is allocated once does not count
        prepare()
        step()
    short = min(_allocated(shorten, step) for _ in range(_RUNS))
    long = min(_allocated(lengthen, step) for _ in range(_RUNS))
    _, function = min(_largest_rise(lengthen, step) for _ in range(_RUNS))
    return Growth(short, long, added_tokens, function)


def _allocated(prepare: Callable[[], object], step: Callable[[], object]) -> int:
    """Return the peak of the bytes that Python allocates in a step, above those before it."""
    prepare()
    was_on = tracemalloc.is_tracing()
    with gc_disabled():
        if not was_on:
            tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            step()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            if not was_on:
                tracemalloc.stop()
    return peak - before


def _largest_rise(prepare: Callable[[], object], step: Callable[[], object]) -> tuple[int, str]:
    """Return the largest rise of the bytes that Python holds during a step, and its function."""
    prepare()
    largest = 0
    where = "no function"
    highest = 0

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal largest, where, highest
        _, peak = tracemalloc.get_traced_memory()
        if peak - highest > largest:
            largest = peak - highest
            before = frame.f_back if event == "call" else None  # the caller has run until now
            ran = before or frame
            where = f"{ran.f_globals.get('__name__', '')}.{ran.f_code.co_qualname}"
        highest = tracemalloc.get_traced_memory()[1]

    was_on, previous = tracemalloc.is_tracing(), sys.getprofile()
    if not was_on:
        tracemalloc.start()
    tracemalloc.reset_peak()
    _, highest = tracemalloc.get_traced_memory()
    try:
        sys.setprofile(profile)
        step()
        sys.setprofile(None)
    finally:
        restore_profiler(previous)
        if not was_on:
            tracemalloc.stop()
    return largest, where
