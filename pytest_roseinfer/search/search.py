"""Looking for an example on which a check fails, and saving the one that was found."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Flaky

from pytest_roseinfer import settings
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.running import coverage
from pytest_roseinfer.running.watchdog import WATCHED, StepHung
from pytest_roseinfer.search import recorder
from pytest_roseinfer.search.tried import kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.mix import RequestMix
    from pytest_roseinfer.cases.history import History

_Example = TypeVar("_Example", "History", "RequestMix")
_OBJECTS = 20_000
"""New objects between two garbage collections, in place of CPython's 700: Triton's interpreter
makes thousands in every operation and leaves hardly a cycle behind."""
_FRAME_WORDS = 1 << 17
"""The size of ``undisturbed``'s own frame.

CPython keeps frames in chunks of 16 KiB and returns a chunk to the system as soon as its last frame
is gone. A loop whose calls happen to begin at the end of a chunk maps and unmaps memory in every
round, which can cost a quarter of a run. A frame of a megabyte gets a chunk of two, and all the
frames inside fit into the rest of it.
"""


class _NotShrunk(BaseException):
    """It takes a failure past Hypothesis, which would try hundreds of smaller examples."""


def search(
    adapter: type[Adapter],
    check: Callable[[_Example], object],
    drawn: SearchStrategy[_Example],
    *,
    examples: int,
    replayed_by: str,
    salt: str,
) -> None:
    """Look for a history, or mix of requests, on which ``check`` fails, and save it.

    ``replayed_by`` names the one of ``reproduce.CHECKS`` that is to run it again. Searches that
    differ in nothing else need different ``salt``, so that they do not draw the same.
    """
    tried: list[_Example] = []
    folder = settings.current().failures_dir
    keeping = (
        kept(adapter, check, replayed_by, folder)
        if WATCHED.seconds and folder
        else nullcontext(check)
    )
    try:
        with keeping as each:
            try_examples(adapter, each, drawn, examples, name=replayed_by, salt=salt, tried=tried)
    except (Exception, KeyboardInterrupt, _NotShrunk) as failure:
        if not tried:
            raise
        (example,) = tried  # the last that was tried is the shrunk one
        found = _difference(failure)
        saved = recorder.record(adapter, example, replayed_by, found or failure, folder)
        if found is None:
            # This takes the place of Hypothesis's own note.
            vars(failure)["__notes__"] = [f"\non {example.words()}\n\n{saved}".rstrip()]
            raise
        found.added.append(saved)
        raise found from found.__cause__


def try_examples(
    adapter: type[Adapter],
    check: Callable[[_Example], object],
    drawn: SearchStrategy[_Example],
    examples: int,
    *,
    name: str,
    salt: str,
    tried: list[_Example],
) -> None:
    """Hand examples to ``check`` until one fails, made as small as possible then.

    ``tried`` holds the latest. Searches with the same ``name`` and ``salt`` draw the same
    examples.
    """
    seed = settings.current().seed

    # Each search has a function of its own: Hypothesis rejects one that is run for two classes.
    def attempt(example: _Example) -> None:
        tried[:] = [example]
        WATCHED.example, WATCHED.began = example, monotonic()
        try:
            check(example)
        except Difference as failure:
            if not isinstance(failure.__cause__, StepHung):
                raise
            failure.added.append("It was not made smaller: every attempt would take as long.")
            raise _NotShrunk from failure
        finally:
            WATCHED.began = WATCHED.example = None

    attempt.__qualname__ = f"{name}[{coverage.name_of(adapter)}]"
    test = given(drawn)(attempt)
    test = hypothesis_settings(
        max_examples=examples,
        # A step under Triton's interpreter takes as long as its launch is large.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        report_multiple_bugs=False,
        print_blob=False,
        # Where it sees a CI, Hypothesis would draw the same histories in every run.
        derandomize=False,
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )(test)
    if seed is not None:
        # Searches of one run must not all draw the same histories.
        test = seeded(f"{seed} {attempt.__qualname__} {salt}")(test)
    try:
        undisturbed(test)
    except (Exception, KeyboardInterrupt, _NotShrunk):
        coverage.current().of(adapter).failed = True
        raise


def _difference(failure: BaseException | None) -> Difference | None:
    """Return the difference that ended a search, also from Hypothesis's error for flaky tests."""
    if isinstance(failure, Difference):
        return failure
    if isinstance(failure, _NotShrunk):
        return _difference(failure.__cause__)
    parts = getattr(failure, "exceptions", ()) if isinstance(failure, Flaky) else ()
    found = next((part for part in parts if isinstance(part, Difference)), None)
    if found:
        found.added.append(
            "The same passed when it was tried again: what happens depends on more than what is "
            "done."
        )
    return found


def undisturbed(search: Callable[[], object]) -> None:
    """Call ``search`` with room for its frames, little garbage collection and one thread.

    More threads would only slow down work on tensors as small as these.
    """
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(_OBJECTS, *thresholds[1:])
    try:
        search()
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)


undisturbed.__code__ = undisturbed.__code__.replace(co_stacksize=_FRAME_WORDS)
