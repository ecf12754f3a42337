"""A search: drawn examples, the failing one made as small as it goes, and its report."""

from __future__ import annotations

import gc
import json
import os
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Flaky, HypothesisWarning

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.engine import RequestMix
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.metamorphic import ROOMY, roomy
from pytest_roseinfer.run.watchdog import WATCHED, StepHung, StoppedAnswering
from pytest_roseinfer.search import recorder, reproduce
from pytest_roseinfer.search.reproduce import CHECKS
from pytest_roseinfer.search.shrink import passes_of_histories, passes_of_mixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.search.reproduce import Example

# Makes an example on which a check fails as small as it goes, within a time.
#
# It tries smaller examples and keeps each on which the check still fails, until none does. It works
# on the example itself, a history or a mix of requests, and not on the choices it was drawn by: a
# choice means something else once one before it is gone.


SHRINK_SECONDS = 20.0
"""The time that making one example smaller may take."""
_Case = TypeVar("_Case", bound="Example")


@dataclass(slots=True)
class Smallest(Generic[_Case]):
    """The smallest example so far, and how the check failed on it."""

    example: _Case
    failure: Exception
    check: Callable[[_Case], object]
    ends: float = field(default_factory=lambda: monotonic() + SHRINK_SECONDS)
    cut_short: bool = False
    """The time was over before all that is smaller had been tried."""
    _tried: set[str] = field(default_factory=set)

    def shrink(self, passes: Sequence[Callable[[_Case], Iterator[_Case]]]) -> None:
        """Try what the passes list, in turns, until nothing smaller fails or the time is over."""
        before = None
        while before != self.example and not self.cut_short:
            before = self.example
            for smaller in passes:
                self._go_through(smaller)

    def say_if_cut_short(self) -> None:
        """Have a failure say that there may be a smaller example."""
        if self.cut_short and isinstance(self.failure, Difference):
            self.failure.added.append(
                f"There may be a smaller one: making it smaller ended after {SHRINK_SECONDS:g} s."
            )

    def _go_through(self, smaller: Callable[[_Case], Iterator[_Case]]) -> None:
        """Try what one pass lists; go on at the same place of the new list where one is kept."""
        at: int | None = 0
        while at is not None:
            at = self._next_kept(smaller, at)

    def _next_kept(self, smaller: Callable[[_Case], Iterator[_Case]], begin: int) -> int | None:
        for at, candidate in enumerate(islice(smaller(self.example), begin, None), begin):
            if self.cut_short:
                return None
            if self._still_fails(candidate):
                return at
        return None

    def _still_fails(self, candidate: _Case) -> bool:
        """Try an example unless it was tried before; keep it if the check fails in the same way."""
        # Of a long history there are many that come to the same, and listing them takes long too.
        self.cut_short = monotonic() > self.ends
        text = json.dumps(candidate.to_json())
        if self.cut_short or text in self._tried:
            return False
        self._tried.add(text)
        try:
            self.check(candidate)
        except type(self.failure) as failure:
            # Who raises an error has another mistake than who holds what is wrong. But an error may
            # come of what was held, which a smaller example shows at once.
            if type(failure.__cause__) not in (type(self.failure.__cause__), type(None)):
                return False
            # An error of a step that fits is worse than one where another is due.
            if _without_room(failure) and not _without_room(self.failure):
                return False
            self.example, self.failure = candidate, failure
            return True
        except Exception:  # something else is wrong there
            return False
        return False


def _without_room(failure: Exception) -> bool:
    return isinstance(failure, Difference) and failure.without_room


# Keeps the example that is tried in a file, so that it is there even where the process ends.


@contextmanager
def kept(
    adapter: type[Adapter], check: Callable[[Any], object], name: str, folder: str
) -> Iterator[Callable[[Any], object]]:
    """Make a check that first saves its example, as a trace for the check called ``name``.

    The file is gone afterwards, unless the process was ended in between.
    """
    path = Path(folder) / f"{adapter.__name__}-tried-by-{os.getpid()}.json"
    try:
        trace = reproduce.trace_of(adapter, name, folder)
        beginning = json.dumps(trace)[:-1]
        reproduce.make_folder(path.parent)
        file = path.open("wb", buffering=0)
    except (OSError, TypeError):  # what cannot be saved can be searched for all the same
        yield check
        return
    longest = 0

    def save_and_check(example: Any) -> object:
        nonlocal longest
        text = f'{beginning}, "example": {json.dumps(example.to_json())}}}'
        longest = max(longest, len(text))
        # Blanks write over the longer example before: to cut a file takes milliseconds.
        os.pwrite(file.fileno(), text.ljust(longest).encode(), 0)
        return check(example)

    WATCHED.saved = reproduce.how_to_replay(path, trace["adapter"])
    try:
        yield save_and_check
    finally:
        WATCHED.saved = ""
        file.close()
        path.unlink(missing_ok=True)


# Counts the kernels that Triton compiles: on a GPU a search waits mostly for these.


class Compilations:
    """A listener of Triton's compiler."""

    def __init__(self, next_listener: Any = None) -> None:
        self.count = 0
        self._next = next_listener

    def __call__(self, *, cache_hit: bool, **said: Any) -> None:
        self.count += not cache_hit
        if self._next is not None:
            self._next(cache_hit=cache_hit, **said)


def compiled_so_far() -> int:
    """Return how many kernels this process has compiled; those read from a cache do not count."""
    from triton import knobs

    if not isinstance(knobs.compilation.listener, Compilations):
        knobs.compilation.listener = Compilations(knobs.compilation.listener)
    return knobs.compilation.listener.count


# Notices that what was tested broke the GPU's context: after that, nothing works in a process.


LOST = (
    "It was not made smaller: the GPU's context is gone, and nothing in this process works any "
    "more. CUDA says so late, so a step before may be to blame: replay it with "
    "CUDA_LAUNCH_BLOCKING=1."
)


class GpuLostError(RuntimeError):
    """An earlier test broke the GPU's context."""

    def __init__(self) -> None:
        super().__init__(
            "the GPU's context is gone since a test before failed: run this one in another process"
        )


def is_lost() -> bool:
    """Ask a GPU that is in use whether it still does anything."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# How often a check fails on one case, where that depends on more than what is done: on time, or
# on how much was asked before.


REPEAT_SECONDS = 60.0
"""No try begins later than so long after the first."""


@dataclass(frozen=True, slots=True)
class HowOften:
    """What came of running one case several times."""

    tried: int
    failures: tuple[Difference, ...]

    def words(self) -> str:
        if self.failures:
            return f"it differed in {len(self.failures)} of {self.tried}"
        times = f" {self.tried} times" if self.tried > 1 else ""
        return f"it ran through{times}: nothing differed"

    def require_none(self) -> None:
        """Raise the first failure, which says how many there were."""
        for failure in self.failures[:1]:
            if self.tried > 1:
                failure.added.append(self.words())
            raise failure


def how_often(check: Callable[[], object], times: int, seconds: float = REPEAT_SECONDS) -> HowOften:
    """Run a check so many times, or as often as there is time for; what is gone ends it."""
    ends = monotonic() + seconds
    tried, failures = 0, []
    while tried < times and (not tried or monotonic() < ends):
        tried += 1
        try:
            check()
        except Difference as failure:
            failures.append(failure)
            if isinstance(failure.__cause__, StoppedAnswering):
                break
    return HowOften(tried, tuple(failures))


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
        raise GpuLostError
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
        often = how_often(partial(again, example), adapter.replays, SHRINK_SECONDS)
        return [f"Served again, {often.words()}."]
    return []


def _never_again(failure: Exception) -> str:
    """Say why what failed cannot be tried again in this process; nothing if it can."""
    if isinstance(failure, Difference) and isinstance(failure.__cause__, StepHung):
        return "It was not made smaller: every attempt would take as long."
    if isinstance(failure.__cause__, StoppedAnswering):
        return "Nothing else was tried, and the mix was not made smaller. Once it answers again,"
    return LOST if _gpu_is_lost() else ""


def _ended(failure: Exception, why: str) -> _Ended:
    if isinstance(failure, Difference):
        failure.added.append(why)
    return _Ended(why)


def _gpu_is_lost() -> bool:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and is_lost()


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
