"""Search: draws examples, shrinks the first failing one, and reports it."""

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
from pytest_roseinfer.findings.known import describe_entry, digest_of
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.watchdog import (
    CURRENT_EXAMPLE,
    StepHung,
    TargetGoneError,
    register_example,
)
from pytest_roseinfer.search import recorder
from pytest_roseinfer.search.named_checks import CHECKS, example_as_run, repeat
from pytest_roseinfer.search.reproduce import ExampleFile
from pytest_roseinfer.search.shrink import SHRINK_SECONDS, Shrinker, passes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.search.named_checks import Example
    from pytest_roseinfer.settings import KnownFinding

_Example = TypeVar("_Example", bound="Example")


class _FinalFailure(BaseException):
    """Failure that Hypothesis must not retry, and that is not shrunk."""


@dataclass(slots=True)
class Search(Generic[_Example]):
    """Search for a history, or a mix of requests, that fails a check."""

    adapter: type[Adapter]
    check: Callable[[_Example], object]
    strategy: SearchStrategy[_Example]
    examples: int
    """Maximum number of examples to try."""
    name: str
    """Name in ``CHECKS`` of the check that replays a saved example."""
    salt: str = ""
    """Part of the seed that differs between searches of one name, so that their examples do."""
    ends: float = math.inf
    """Deadline for the start of examples, in ``monotonic`` time."""
    example: _Example | None = field(default=None, init=False)
    """Latest example; after a failure, the smallest with the same failure. None before any."""
    num_skipped: int = field(default=0, init=False)
    """Number of examples that were not tried because the time limit was over."""
    _file: ExampleFile | None = field(default=None, init=False)
    _known: Mapping[str, KnownFinding] = field(init=False)
    """Known findings of the adapter, by digest."""

    def __post_init__(self) -> None:
        self._known = settings.current().known_of(coverage.name_of(self.adapter))

    def run(self) -> None:
        """Try examples until one fails; shrink it, save it, and raise its failure."""
        if monotonic() > self.ends:
            self.num_skipped = self.examples
            return
        if gpu_is_lost():
            raise GpuLostError
        try:
            # Without the watchdog, nothing ends the process in the middle of an example.
            keeps_file = CURRENT_EXAMPLE.seconds and settings.current().failures_dir
            with (
                ExampleFile.of(self.adapter, self.name)
                if keeps_file
                else nullcontext() as self._file
            ):
                self._try_and_shrink()
        except (Exception, KeyboardInterrupt, _FinalFailure) as raised:
            if self.example is None:
                raise
            failure = self._report(self.example, raised)
            raise failure from failure.__cause__

    def try_examples(self) -> None:
        """Try examples until one fails, and raise its failure without shrinking."""
        target = coverage.current().of(self.adapter)
        compiled = compiled_so_far if settings.current().gpu else int
        began, before = monotonic(), compiled()
        try:
            with warnings.catch_warnings():
                # The warning is about the failing example before shrinking, which is not shown.
                warnings.filterwarnings(
                    "ignore", "Generating overly large repr", hypothesis.errors.HypothesisWarning
                )
                run_isolated(self._test())
        except (Exception, KeyboardInterrupt, _FinalFailure):
            target.note_failure()
            raise
        finally:
            target.seconds += monotonic() - began
            target.num_compiled_kernels += compiled() - before

    def check_once(self, example: _Example) -> None:
        """Check one example, registered with the watchdog and the example file."""
        CURRENT_EXAMPLE.example, CURRENT_EXAMPLE.step_began_at = example, process_time()
        try:
            if self._file:
                self._file.write(example)
            self.check(example)
        finally:
            CURRENT_EXAMPLE.step_began_at = CURRENT_EXAMPLE.example = None

    def _test(self) -> Callable[[], None]:
        """Return a Hypothesis test of this search; the same seed draws the same examples."""

        # One function per search: Hypothesis rejects a function that is run for two classes.
        def attempt(example: _Example) -> None:
            self._attempt(example)

        attempt.__qualname__ = f"{self.name}[{coverage.name_of(self.adapter)}]"
        # Hypothesis keeps failing examples by the test's source, which all searches share. Turns
        # of one aim draw alike, so each may use the examples of the others.
        key = f"{attempt.__qualname__} {self.salt.rpartition(' ')[0]}".encode()
        attempt._hypothesis_internal_add_digest = key  # type: ignore[attr-defined]
        users = hypothesis.settings.default or hypothesis.settings()
        test = hypothesis.given(self.strategy)(attempt)
        if (seed := settings.current().seed) is not None:
            # Searches of one run must not all draw the same histories.
            test = hypothesis.seed(f"{seed} {attempt.__qualname__} {self.salt}")(test)
        return hypothesis.settings(
            max_examples=self.examples,
            # Under Triton's interpreter, a step's time grows with its launch.
            deadline=None,
            suppress_health_check={*users.suppress_health_check, hypothesis.HealthCheck.too_slow},
            report_multiple_bugs=False,
            print_blob=False,
            # ``options`` reads it: a profile of the user sets the seed.
            derandomize=False,
            database=users.database if settings.current().reuses_examples else None,
            # Without Hypothesis's shrinking of choices: ``Shrinker`` shrinks the example itself.
            phases=[hypothesis.Phase.generate]
            + [hypothesis.Phase.reuse] * (hypothesis.Phase.reuse in users.phases),
        )(test)

    def _attempt(self, example: _Example) -> None:
        # Hypothesis retries the failing example, which must run even after the deadline.
        if monotonic() > self.ends and example != self.example:
            self.num_skipped += 1
            return
        self.example = example
        try:
            self.check_once(example)
        except Exception as failure:
            if reason := _unrepeatable_reason(failure):
                raise _final_failure(failure, reason) from failure
            if not self._is_known(example, failure):
                raise

    def _is_known(self, example: _Example, failure: Exception) -> bool:
        """Return True for a failure that is a known finding, which the search goes past.

        The first one is shrunk and recorded for the report.
        """
        target = coverage.current().of(self.adapter)
        digest = digest_of(target_name := coverage.name_of(self.adapter), failure)
        if digest not in self._known:
            return False
        if digest not in target.known_met:
            shrinker = Shrinker(
                example,
                failure,
                partial(
                    self._check_smaller,
                    counts=lambda other: digest_of(target_name, other) == digest,
                ),
            )
            shrinker.shrink(passes_of(self.adapter, example))
            self._report(shrinker.example, shrinker.failure)
        target.known_met[digest] += 1
        target.note_failure()
        return True

    def _is_new(self, failure: Exception) -> bool:
        return digest_of(coverage.name_of(self.adapter), failure) not in self._known

    def _try_and_shrink(self) -> None:
        """Raise the failure of the smallest example that fails like the first failing one."""
        try:
            self.try_examples()
        except Exception as failure:
            if self.example is None or isinstance(failure, hypothesis.errors.Flaky):
                raise
            check = partial(self._check_smaller, counts=self._is_new)
            shrinker = Shrinker(self.example, failure, check)
            passes = passes_of(self.adapter, self.example)
            run_isolated(lambda: shrinker.shrink(passes))
            self.example = shrinker.example
            shrinker.note_if_cut_short()
            raise shrinker.failure from shrinker.failure.__cause__

    def _check_smaller(self, example: _Example, counts: Callable[[Exception], bool]) -> None:
        """Check a smaller example; for targets with random failures, it must fail twice.

        Otherwise a chance failure could shrink to an example that is not its cause. Failures that
        do not count are left out. If the target is gone, the search ends.
        """
        for last in (False, True) if self.adapter.replays > 1 else (True,):
            try:
                self.check_once(example)
                return
            except Exception as failure:
                if isinstance(failure.__cause__, TargetGoneError):
                    self.example = example
                    raise _final_failure(failure, _unrepeatable_reason(failure)) from failure
                if not counts(failure):
                    return
                if last:
                    raise

    def _report(self, example: Example, raised: BaseException) -> BaseException:
        """Save a failing example, and return its failure with the replay instructions."""
        ended = isinstance(raised, _FinalFailure)
        failure: BaseException = (raised.__cause__ if ended else None) or raised
        difference = _difference(failure)
        if difference and self.adapter.replays > 1 and not ended:
            difference.extra_paragraphs += self._describe_repetition(example)
        example = example_as_run(self.name, self.adapter, example)  # as in the failure's message
        folder = settings.current().failures_dir
        saved = recorder.record(self.adapter, example, self.name, difference or failure, folder)
        if difference:
            difference.extra_paragraphs += filter(None, [saved, self._describe_digest(difference)])
            return difference
        # This takes the place of Hypothesis's own note.
        words = f"\non {self.adapter.describe(example)}\n\n{raised if ended else ''}\n{saved}"
        words += f"\n\n{self._describe_digest(failure)}"
        vars(failure)["__notes__"] = [words.rstrip()]
        return failure

    def _describe_digest(self, failure: BaseException) -> str:
        """Return the lines that make a failure a known finding, unless another test shows them."""
        target = coverage.name_of(self.adapter)
        digest, test = digest_of(target, failure), coverage.current_test()
        if not test or isinstance(failure, KeyboardInterrupt) or digest in self._known:
            return ""
        if isinstance(failure, Difference) and failure.reported_by:
            return f"digest {digest}, as there"
        return describe_entry(digest, target, test.rpartition("::")[2].partition("[")[0])

    def _describe_repetition(self, example: Example) -> list[str]:
        """Describe how often an example fails when repeated; errors of that are ignored."""
        check = partial(CHECKS[self.name], self.adapter, example)
        with suppress(Exception), register_example(example):
            repetition = repeat(check, self.adapter.replays, SHRINK_SECONDS)
            return [f"Served again, {repetition.describe()}."]
        return []


def _unrepeatable_reason(failure: Exception) -> str:
    """Return why a failing example cannot be retried in this process; "" if it can."""
    if isinstance(failure, Difference) and isinstance(failure.__cause__, StepHung):
        return "It was not shrunk: every attempt would take as long."
    if isinstance(failure.__cause__, TargetGoneError):
        return "Nothing else was tried, and the mix was not shrunk. Once it answers again,"
    return LOST if gpu_is_lost() else ""


def _final_failure(failure: Exception, reason: str) -> _FinalFailure:
    if isinstance(failure, Difference):
        failure.extra_paragraphs.append(reason)
    return _FinalFailure(reason)


def _difference(failure: BaseException | None) -> Difference | None:
    """Return the difference that ended a search, also from Hypothesis's error for flaky tests."""
    if isinstance(failure, Difference):
        return failure
    if not isinstance(failure, hypothesis.errors.Flaky):
        return None
    for part in getattr(failure, "exceptions", ()):
        if isinstance(part, Difference):
            part.extra_paragraphs.append(
                "The same example passed when it was tried again: the result depends on more than "
                "the example."
            )
            return part
    return None


# Process settings of a search: room for its frames, one thread, and little garbage collection.


_OBJECTS = 20_000
"""New objects between two garbage collections, instead of CPython's 700: Triton's interpreter
creates thousands in each operation, with hardly any cycles."""
_LOCAL_NAMES = 1 << 14
"""Number of local names of the function that calls a search, whose frame takes 128 KiB.

CPython allocates frames in chunks of 16 KiB and returns a chunk to the system once its last frame
is gone. A loop whose calls start at the end of a chunk maps and unmaps memory in every iteration,
which can take a third of a run. A frame of 128 KiB gets a chunk of 256, whose rest has room for all
inner frames.
"""


def run_isolated(search: Callable[[], object]) -> None:
    """Call ``search`` with room for its frames, little garbage collection and one thread.

    More threads would only slow down operations on tensors this small.
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
    """Return a function that calls another one from a large frame, full of unused locals."""
    names = " = ".join(f"_{number}" for number in range(_LOCAL_NAMES))
    namespace: dict[str, Any] = {}
    exec(f"def call(function):\n    {names} = None\n    function()", namespace)
    call: Callable[[Callable[[], object]], None] = namespace["call"]
    return call


# Count of compiled Triton kernels: on a GPU, a search mostly waits for compilation.


class Compilations:
    """Listener of Triton's compiler that counts compilations."""

    def __init__(self, next_listener: Any = None) -> None:
        self.count = 0
        self._next = next_listener

    def __call__(self, *, cache_hit: bool, **details: Any) -> None:
        self.count += not cache_hit
        if self._next is not None:
            self._next(cache_hit=cache_hit, **details)


def compiled_so_far() -> int:
    """Return the number of kernels that this process has compiled, without cache hits."""
    from triton import knobs

    if not isinstance(knobs.compilation.listener, Compilations):
        knobs.compilation.listener = Compilations(knobs.compilation.listener)
    return knobs.compilation.listener.count


# Loss of the GPU's context by the tested code, after which the process cannot use the GPU.


LOST = (
    "It was not shrunk: the GPU's context is lost, and nothing on it works in this process any "
    "more. CUDA reports errors late, so an earlier step may be the cause: replay it with "
    "CUDA_LAUNCH_BLOCKING=1."
)


class GpuLostError(RuntimeError):
    """Error of a test after another one broke the GPU's context."""

    def __init__(self) -> None:
        super().__init__(
            "the GPU's context was lost in an earlier test: run this one in another process"
        )


def gpu_is_lost() -> bool:
    """Return True if this process used a GPU and its context is broken."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
