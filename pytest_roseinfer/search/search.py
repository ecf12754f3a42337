"""Looking for an example on which a check fails, and saving the one that was found."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Flaky

from pytest_roseinfer import settings
from pytest_roseinfer.findings import reproduce
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.running import coverage

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.cases.history import History
    from pytest_roseinfer.engines.mix import RequestMix
    from pytest_roseinfer.findings.reproduce import Example

_Example = TypeVar("_Example", "History", "RequestMix")
_OBJECTS = 20_000
"""New objects between two collections of garbage, in place of CPython's 700: Triton's
interpreter makes thousands in every operation and leaves hardly a cycle behind."""
_FRAME_WORDS = 1 << 17
"""The size of ``undisturbed``'s own frame.

CPython lays frames into chunks of 16 KiB and gives a chunk back to the system as soon as its
last frame is gone. A loop whose calls happen to begin at the end of a chunk maps and unmaps
memory in every round; that can cost a quarter of a run, and comes and goes with the number of
frames outside. A frame of a megabyte is given a chunk of two, and the other half of that is
more than all the frames inside can fill.
"""


def search(
    adapter: type[Adapter],
    check: Callable[[_Example], object],
    drawn: SearchStrategy[_Example],
    *,
    examples: int,
    replayed_by: str,
    salt: str,
) -> None:
    """Look for a history, or mix of requests, on which ``check`` fails; save what was found.

    ``replayed_by`` names the one of ``reproduce.CHECKS`` that is to run it again. Searches that
    differ in nothing else need different ``salt``, so that they do not draw the same.
    """
    tried: list[_Example] = []
    try:
        try_examples(adapter, check, drawn, examples, name=replayed_by, salt=salt, tried=tried)
    except (Exception, KeyboardInterrupt) as failure:
        if not tried:
            raise
        (example,) = tried  # the last that was tried is the shrunk one
        found = _difference(failure)
        if found is None:
            _note(failure, example, _saved(adapter, example, replayed_by, repr(failure)))
            raise
        found.added.append(_saved(adapter, example, replayed_by, str(found)))
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
    examples. A fresh function is handed to Hypothesis for every search, since it rejects one
    that runs as a method of two classes.
    """
    asked = settings.current()

    def attempt(example: _Example) -> None:
        tried[:] = [example]
        check(example)

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
    if asked.seed is not None:
        # Searches of one run must not all draw the same histories.
        test = seeded(f"{asked.seed} {attempt.__qualname__} {salt}")(test)
    try:
        undisturbed(test)
    except (Exception, KeyboardInterrupt):
        coverage.current().of(adapter).failed = True
        raise


def _difference(failure: BaseException) -> Difference | None:
    """The difference that ended a search, alone or among what Hypothesis calls flaky."""
    if isinstance(failure, Difference):
        return failure
    if isinstance(failure, Flaky):
        for part in getattr(failure, "exceptions", ()):
            if isinstance(part, Difference):
                part.added.append(
                    "The same passed when it was tried again: what happens depends on more than "
                    "what is done."
                )
                return part
    return None


def _saved(adapter: type[Adapter], example: Example, check: str, message: str) -> str:
    """Save a failure; say how it is run again."""
    folder = settings.current().failures_dir
    return reproduce.save(adapter, example, check, message, folder) if folder else ""


def _note(failure: BaseException, example: Example, how: str) -> None:
    """Say after an error on what it was raised, in place of Hypothesis's own note."""
    vars(failure)["__notes__"] = [f"\non {example.words()}\n\n{how}".rstrip()]


def undisturbed(search: Callable[[], object]) -> None:
    """Call ``search`` with room for its frames, little garbage collection and one thread.

    Tensors as small as these only wait for further threads.
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
