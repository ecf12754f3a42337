"""Looking for an example on which a check fails, and saving the one that was found."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Flaky, HypothesisWarning

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.mix import RequestMix
from pytest_roseinfer.cases.history import History
from pytest_roseinfer.engines.how_often import how_often
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.running import coverage
from pytest_roseinfer.running.adapter_findings import StoppedAnswering
from pytest_roseinfer.running.metamorphic import ROOMY, roomy
from pytest_roseinfer.running.watchdog import WATCHED, StepHung
from pytest_roseinfer.search import gpu_context, recorder
from pytest_roseinfer.search.compilations import compiled_so_far
from pytest_roseinfer.search.reproduce import CHECKS
from pytest_roseinfer.search.smaller_histories import passes_of_histories
from pytest_roseinfer.search.smaller_mixes import passes_of_mixes
from pytest_roseinfer.search.smallest import SECONDS, Smallest
from pytest_roseinfer.search.tried import kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.base import Adapter

_Example = TypeVar("_Example", "History", "RequestMix")
_PASSES: dict[type, Callable[[type[Any]], Any]] = {
    History: passes_of_histories,
    RequestMix: passes_of_mixes,
}
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


class _Ended(BaseException):
    """It takes a failure past Hypothesis, which would try again what cannot be tried again."""


def search(
    adapter: type[Adapter],
    check: Callable[[_Example], object],
    drawn: SearchStrategy[_Example],
    *,
    examples: int,
    replayed_by: str,
    salt: str,
    ends: float,
) -> int:
    """Look for a history, or mix of requests, on which ``check`` fails, and save it.

    ``replayed_by`` names the one of ``reproduce.CHECKS`` that is to run it again. Searches that
    differ in nothing else need different ``salt``, so that they do not draw the same. No example
    begins after ``ends``; return how many were left out for that.
    """
    if monotonic() > ends:
        return examples
    if _gpu_is_lost():
        raise gpu_context.GpuLostError
    tried: list[_Example] = []
    left_out = 0
    folder = settings.current().failures_dir
    keeping = (
        kept(adapter, check, replayed_by, folder)
        if WATCHED.seconds and folder
        else nullcontext(check)
    )
    try:
        with keeping as each, _made_smaller(adapter, each, tried):

            def in_time(example: _Example) -> None:
                nonlocal left_out
                if monotonic() > ends and tried != [example]:  # what failed is tried once more
                    left_out += 1
                    return
                tried[:] = [example]
                each(example)

            try_examples(adapter, in_time, drawn, examples, name=replayed_by, salt=salt)
    except (Exception, KeyboardInterrupt, _Ended) as raised:
        if not tried:
            raise
        failure = _saved(adapter, tried[0], raised, replayed_by, folder)
        raise failure from failure.__cause__
    return left_out


def _saved(
    adapter: type[Adapter],
    example: History | RequestMix,
    raised: BaseException,
    replayed_by: str,
    folder: str | None,
) -> BaseException:
    """Save an example that failed, and return its failure, which says where that is."""
    ended = isinstance(raised, _Ended)
    failure: BaseException = (raised.__cause__ if ended else None) or raised
    found = _difference(failure)
    if found and adapter.replays > 1 and not ended:
        found.added += _how_often(adapter, example, replayed_by)
    if replayed_by in ROOMY and isinstance(example, History):  # as the failure says it
        assert issubclass(adapter, KVCacheAdapter)
        example = roomy(adapter, example)
    saved = recorder.record(adapter, example, replayed_by, found or failure, folder)
    if found:
        found.added.append(saved)
        return found
    # This takes the place of Hypothesis's own note.
    words = f"\non {adapter.in_words(example)}\n\n{raised if ended else ''}\n{saved}"
    vars(failure)["__notes__"] = [words.rstrip()]
    return failure


def _how_often(adapter: type[Adapter], example: History | RequestMix, check: str) -> list[str]:
    """Say how often an example fails when it is run again. What goes wrong then hides nothing."""
    again = _watched(partial(CHECKS[check], adapter))
    with suppress(Exception):
        often = how_often(partial(again, example), adapter.replays, SECONDS)
        return [f"Served again, {often.words()}."]
    return []


def _never_again(failure: Exception) -> str:
    """Say why what failed cannot be tried again in this process; nothing if it can."""
    if isinstance(failure, Difference) and isinstance(failure.__cause__, StepHung):
        return "It was not made smaller: every attempt would take as long."
    if isinstance(failure.__cause__, StoppedAnswering):
        return "Nothing else was tried, and the mix was not made smaller. Once it answers again,"
    return gpu_context.LOST if _gpu_is_lost() else ""


def _ended(failure: Exception, why: str) -> _Ended:
    if isinstance(failure, Difference):
        failure.added.append(why)
    return _Ended(why)


def _gpu_is_lost() -> bool:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and gpu_context.is_lost()


@contextmanager
def _made_smaller(
    adapter: type[Adapter], check: Callable[[_Example], object], tried: list[_Example]
) -> Iterator[None]:
    """Raise how the check fails on the smallest example like that on which it failed inside.

    That replaces the one in ``tried``.
    """
    try:
        yield
    except Exception as failure:
        if not tried or isinstance(failure, Flaky):
            raise
        again = _until_gone(_watched(check), tried)
        each_time = again if adapter.replays == 1 else _failing_twice(again)
        smallest = Smallest(tried[0], failure, each_time)
        passes = _PASSES[type(tried[0])](adapter)
        undisturbed(lambda: smallest.shrink(passes))
        tried[:] = [smallest.example]
        smallest.say_if_cut_short()
        raise smallest.failure from smallest.failure.__cause__


def _failing_twice(check: Callable[[_Example], None]) -> Callable[[_Example], None]:
    """Fail where the check fails two times: what fails now and then would shrink to what is not
    to blame."""

    def failing_twice(example: _Example) -> None:
        try:
            check(example)
        except Exception:
            check(example)

    return failing_twice


def _until_gone(
    check: Callable[[_Example], None], tried: list[_Example]
) -> Callable[[_Example], None]:
    """End the search for the smallest example if what is tested is gone on the way.

    The one in ``tried`` is then that on which it went.
    """

    def until_gone(example: _Example) -> None:
        try:
            check(example)
        except Difference as failure:
            if isinstance(failure.__cause__, StoppedAnswering):
                tried[:] = [example]
                raise _ended(failure, _never_again(failure)) from failure
            raise

    return until_gone


def _watched(check: Callable[[_Example], object]) -> Callable[[_Example], None]:
    """Have the watchdog know of each example while it is checked."""

    def watched(example: _Example) -> None:
        WATCHED.example, WATCHED.began = example, process_time()
        try:
            check(example)
        finally:
            WATCHED.began = WATCHED.example = None

    return watched


def try_examples(
    adapter: type[Adapter],
    check: Callable[[_Example], object],
    drawn: SearchStrategy[_Example],
    examples: int,
    *,
    name: str,
    salt: str,
) -> None:
    """Hand examples to ``check`` until one fails.

    Searches with the same ``name`` and ``salt`` draw the same examples.
    """
    watched = _watched(check)

    # Each search has a function of its own: Hypothesis rejects one that is run for two classes.
    def attempt(example: _Example) -> None:
        try:
            watched(example)
        except Exception as failure:
            why = _never_again(failure)
            if not why:
                raise
            raise _ended(failure, why) from failure

    attempt.__qualname__ = f"{name}[{coverage.name_of(adapter)}]"
    test = _drawing(attempt, drawn, examples, salt)
    target = coverage.current().of(adapter)
    compiled = compiled_so_far if settings.current().gpu else int
    began, before = monotonic(), compiled()
    try:
        with warnings.catch_warnings():
            # Of the example that failed, which is not the one that is shown.
            warnings.filterwarnings("ignore", "Generating overly large repr", HypothesisWarning)
            undisturbed(test)
    except (Exception, KeyboardInterrupt, _Ended):
        target.failed = True
        raise
    finally:
        target.seconds += monotonic() - began
        target.compiled += compiled() - before


def _drawing(
    attempt: Callable[[_Example], None],
    drawn: SearchStrategy[_Example],
    examples: int,
    salt: str,
) -> Callable[[], None]:
    """Return a test for which Hypothesis draws examples, the same ones for the same run's seed."""
    test = hypothesis_settings(
        max_examples=examples,
        # A step under Triton's interpreter takes as long as its launch is large.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        report_multiple_bugs=False,
        print_blob=False,
        # Where it sees a CI, Hypothesis would draw the same histories in every run.
        derandomize=False,
        # It would change what was drawn; ``Smallest`` makes the example itself smaller.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )(given(drawn)(attempt))
    if (seed := settings.current().seed) is not None:
        # Searches of one run must not all draw the same histories.
        test = seeded(f"{seed} {attempt.__qualname__} {salt}")(test)
    return test


def _difference(failure: BaseException | None) -> Difference | None:
    """Return the difference that ended a search, also from Hypothesis's error for flaky tests."""
    if isinstance(failure, Difference):
        return failure
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
