"""One entry of the list of docs/explanation/by-hand.md: the tests that find a bug in one cache.

This is a module of its own, since a spawned process does not import ``__main__`` of a package.
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
    message, seconds = _run(harness_on(library).test_histories)

    by_hand = type("ByHandOfThis", (ByHand,), {"library": library})
    run_settings = hypothesis_settings(
        phases=[Phase.generate], database=None, deadline=None, verbosity=Verbosity.quiet
    )
    run = partial(run_state_machine_as_test, seed(1)(by_hand), settings=run_settings)
    message_by_hand, seconds_by_hand = _run(run)
    print(f"{seconds:.1f} s, by hand {seconds_by_hand:.1f} s", file=sys.stderr, flush=True)
    results = f"(harness: {_yes_or_no(message)}, by hand: {_yes_or_no(message_by_hand)})"
    return f"{results}: {message}" if message else f"{results}."


def _run(test: Callable[[], object]) -> tuple[str, float]:
    """Return the first line of a test's failure, and its CPU seconds."""
    begin = time.process_time()
    message = ""
    try:
        test()
    except Exception as failure:
        message = (
            str(getattr(failure, "summary", failure)).partition("\n")[0] or type(failure).__name__
        )
    return message, time.process_time() - begin


def _yes_or_no(message: str) -> str:
    return "yes" if message else "no"
