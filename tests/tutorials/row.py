"""One entry of the list of docs/by-hand.md: the tests that find a bug in one cache.

A module of its own: a process that is started anew imports no ``__main__`` of a package.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from hypothesis import Phase, Verbosity, seed
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from pytest_roseinfer import settings
from tests.tutorials.by_hand import ByHand
from tests.tutorials.planted_bugs import load
from tests.tutorials.printed import harness_on

if TYPE_CHECKING:
    from collections.abc import Callable


def row_of(source: str) -> str:
    library = load(source)
    settings.set_current(settings.Settings(seed=1))
    said, slow = _tried(harness_on(library).test_histories)

    by_hand = type("ByHandOfThis", (ByHand,), {"library": library})
    asked = hypothesis_settings(
        phases=[Phase.generate], database=None, deadline=None, verbosity=Verbosity.quiet
    )
    run = partial(run_state_machine_as_test, seed(1)(by_hand), settings=asked)
    hand, hand_slow = _tried(run)
    print(f"{slow:.1f} s, by hand {hand_slow:.1f} s", file=sys.stderr, flush=True)
    found = f"(harness: {_found(said)}, by hand: {_found(hand)})"
    return f"{found}: {said}" if said else f"{found}."


def _tried(test: Callable[[], object]) -> tuple[str, float]:
    """Return the first line of what a test fails with, and the seconds of CPU that it took."""
    began = time.process_time()
    said = ""
    try:
        test()
    except Exception as failure:
        said = str(getattr(failure, "what", failure)).partition("\n")[0] or type(failure).__name__
    return said, time.process_time() - began


def _found(said: str) -> str:
    return "yes" if said else "no"
