"""A search: drawn examples, the failing one made as small as it goes, and its report."""

from __future__ import annotations

import gc
import math
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import hypothesis
import torch

from pytest_roseinfer import settings
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.watchdog import WATCHED, StepHung, StoppedAnswering, watched
from pytest_roseinfer.search import recorder
from pytest_roseinfer.search.checks import CHECKS, example_as_run, repeat
from pytest_roseinfer.search.reproduce import ExampleFile
from pytest_roseinfer.search.shrink import SHRINK_SECONDS, Shrinker, passes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.search.checks import Example

_Example = TypeVar("_Example", bound="Example")


class _Ended(BaseException):
    """A failure that Hypothesis must not try again, and that is not made smaller."""


@dataclass(slots=True)
class Search(Generic[_Example]):
    """A search for a history, or a mix of requests, on which a check fails."""

    adapter: type[Adapter]
    check: Callable[[_Example], object]
    drawn: SearchStrategy[_Example]
    examples: int
    """Examples to try, at most."""
    name: str
    """Name among ``CHECKS`` of the check that runs a saved example again."""
    salt: str = ""
    """Text that differs between searches of one name, which would else draw the same examples."""
    ends: float = math.inf
    """Time of the monotonic clock after which no example begins."""
    example: _Example | None = field(default=None, init=False)
    """Latest example; after a failure, the smallest that fails like it. None before the first."""
    left_out: int = field(default=0, init=False)
    """Examples that were not tried, since the time was over."""
    _file: ExampleFile | None = field(default=None, init=False)

    def run(self) -> None:
        """Try examples until one fails; make that one small, save it, and raise its failure."""
        if monotonic() > self.ends:
            self.left_out = self.examples
            return
        if gpu_is_lost():
            raise GpuLostError
        try:
            kept = WATCHED.seconds and settings.current().failures_dir  # else nobody ends it
            with ExampleFile.of(self.adapter, self.name) if kept else nullcontext() as self._file:
                self._try_and_shrink()
        except (Exception, KeyboardInterrupt, _Ended) as raised:
            if self.example is None:
                raise
            failure = self._report(self.example, raised)
            raise failure from failure.__cause__

    def try_examples(self) -> None:
        """Try examples until one fails, and raise its failure as it is."""
        target = coverage.current().of(self.adapter)
        compiled = compiled_so_far if settings.current().gpu else int
        began, before = monotonic(), compiled()
        try:
            with warnings.catch_warnings():
                # Of the example that failed, which is not the one that is shown.
                warnings.filterwarnings(
                    "ignore", "Generating overly large repr", hypothesis.errors.HypothesisWarning
                )
                undisturbed(self._test())
        except (Exception, KeyboardInterrupt, _Ended):
            target.failed = True
            raise
        finally:
            target.seconds += monotonic() - began
            target.compiled += compiled() - before

    def check_once(self, example: _Example) -> None:
        """Check one example, which the watchdog and the file of examples know meanwhile."""
        WATCHED.example, WATCHED.began = example, process_time()
        try:
            if self._file:
                self._file.write(example)
            self.check(example)
        finally:
            WATCHED.began = WATCHED.example = None

    def _test(self) -> Callable[[], None]:
        """Return a test for which Hypothesis draws examples, the same ones for the same seed."""

        # Each search has a function of its own: Hypothesis rejects one that is run for two classes.
        def attempt(example: _Example) -> None:
            self._attempt(example)

        attempt.__qualname__ = f"{self.name}[{coverage.name_of(self.adapter)}]"
        test = hypothesis.settings(
            max_examples=self.examples,
            # A step under Triton's interpreter takes as long as its launch is large.
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
            report_multiple_bugs=False,
            print_blob=False,
            # Where it sees a CI, Hypothesis would draw the same histories in every run.
            derandomize=False,
            # It would change what was drawn; ``Shrinker`` makes the example itself smaller.
            phases=[
                hypothesis.Phase.explicit,
                hypothesis.Phase.reuse,
                hypothesis.Phase.generate,
            ],
        )(hypothesis.given(self.drawn)(attempt))
        if (seed := settings.current().seed) is not None:
            # Searches of one run must not all draw the same histories.
            test = hypothesis.seed(f"{seed} {attempt.__qualname__} {self.salt}")(test)
        return test

    def _attempt(self, example: _Example) -> None:
        if monotonic() > self.ends and example != self.example:  # what failed is tried once more
            self.left_out += 1
            return
        self.example = example
        try:
            self.check_once(example)
        except Exception as failure:
            if why := _never_again(failure):
                raise _ended(failure, why) from failure
            raise

    def _try_and_shrink(self) -> None:
        """Raise how the check fails on the smallest example like the first that fails."""
        try:
            self.try_examples()
        except Exception as failure:
            if self.example is None or isinstance(failure, hypothesis.errors.Flaky):
                raise
            shrinker = Shrinker(self.example, failure, self._check_smaller)
            passes = passes_of(self.adapter, self.example)
            undisturbed(lambda: shrinker.shrink(passes))
            self.example = shrinker.example
            shrinker.say_if_cut_short()
            raise shrinker.failure from shrinker.failure.__cause__

    def _check_smaller(self, example: _Example) -> None:
        """Check an example; where failures come now and then, it must fail twice.

        What failed once may shrink to what is not to blame. If the target is gone, the search ends.
        """
        for last in (False, True) if self.adapter.replays > 1 else (True,):
            try:
                self.check_once(example)
                return
            except Exception as failure:
                if isinstance(failure.__cause__, StoppedAnswering):
                    self.example = example
                    raise _ended(failure, _never_again(failure)) from failure
                if last:
                    raise

    def _report(self, example: Example, raised: BaseException) -> BaseException:
        """Save an example that failed, and return its failure, which says where that is."""
        ended = isinstance(raised, _Ended)
        failure: BaseException = (raised.__cause__ if ended else None) or raised
        difference = _difference(failure)
        if difference and self.adapter.replays > 1 and not ended:
            difference.added += self._repeated(example)
        example = example_as_run(self.name, self.adapter, example)  # as the failure says it
        folder = settings.current().failures_dir
        saved = recorder.record(self.adapter, example, self.name, difference or failure, folder)
        if difference:
            difference.added.append(saved)
            return difference
        # This takes the place of Hypothesis's own note.
        words = f"\non {self.adapter.describe(example)}\n\n{raised if ended else ''}\n{saved}"
        vars(failure)["__notes__"] = [words.rstrip()]
        return failure

    def _repeated(self, example: Example) -> list[str]:
        """Say how often an example fails when it is run again. An error then hides nothing."""
        check = partial(CHECKS[self.name], self.adapter, example)
        with suppress(Exception), watched(example):
            repetition = repeat(check, self.adapter.replays, SHRINK_SECONDS)
            return [f"Served again, {repetition.words()}."]
        return []


def _never_again(failure: Exception) -> str:
    """Say why what failed cannot be tried again in this process; nothing if it can."""
    if isinstance(failure, Difference) and isinstance(failure.__cause__, StepHung):
        return "It was not made smaller: every attempt would take as long."
    if isinstance(failure.__cause__, StoppedAnswering):
        return "Nothing else was tried, and the mix was not made smaller. Once it answers again,"
    return LOST if gpu_is_lost() else ""


def _ended(failure: Exception, why: str) -> _Ended:
    if isinstance(failure, Difference):
        failure.added.append(why)
    return _Ended(why)


def _difference(failure: BaseException | None) -> Difference | None:
    """Return the difference that ended a search, also from Hypothesis's error for flaky tests."""
    if isinstance(failure, Difference):
        return failure
    if not isinstance(failure, hypothesis.errors.Flaky):
        return None
    for part in getattr(failure, "exceptions", ()):
        if isinstance(part, Difference):
            part.added.append(
                "The same passed when it was tried again: what happens depends on more than what "
                "is done."
            )
            return part
    return None


# What a search does to its process: room for its frames, one thread, and little collection.


_OBJECTS = 20_000
"""New objects between two garbage collections, in place of CPython's 700: Triton's interpreter
makes thousands in every operation and leaves hardly a cycle behind."""
_LOCAL_NAMES = 1 << 14
"""Local names of the function that calls a search: its frame takes 128 KiB.

CPython keeps frames in chunks of 16 KiB and returns a chunk to the system as soon as its last frame
is gone. A loop whose calls happen to begin at the end of a chunk maps and unmaps memory in every
round, which can cost a third of a run. A frame of 128 KiB gets a chunk of 256, and all the frames
inside fit into the rest of it.
"""


def undisturbed(search: Callable[[], object]) -> None:
    """Call ``search`` with room for its frames, little garbage collection and one thread.

    More threads would only slow down work on tensors as small as these.
    """
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(_OBJECTS, *thresholds[1:])
    try:
        _large_frame()(search)
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)


@cache
def _large_frame() -> Callable[[Callable[[], object]], None]:
    """Return a function that calls another from a large frame, which has room for its locals."""
    names = " = ".join(f"_{number}" for number in range(_LOCAL_NAMES))
    namespace: dict[str, Any] = {}
    exec(f"def call(function):\n    {names} = None\n    function()", namespace)
    call: Callable[[Callable[[], object]], None] = namespace["call"]
    return call


# Counts the kernels that Triton compiles: on a GPU a search waits mostly for these.


class Compilations:
    """A listener of Triton's compiler."""

    def __init__(self, next_listener: Any = None) -> None:
        self.count = 0
        self._next = next_listener

    def __call__(self, *, cache_hit: bool, **details: Any) -> None:
        self.count += not cache_hit
        if self._next is not None:
            self._next(cache_hit=cache_hit, **details)


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


def gpu_is_lost() -> bool:
    """Return True for a GPU that is in use and does nothing any more."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
