"""Attempts at killing one mutant: examples of the shipped suite first, unit tests second."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.load_target import load_target
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.interpreter import fast_interpreter
from pytest_roseinfer.search.named_checks import CHECKS
from pytest_roseinfer.settings import Settings
from tests.mutants.forking import in_child
from tests.mutation.planting import plant
from tests.mutation.recording import PYTEST_OPTIONS, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FunctionType

    from tests.mutation.planting import Mutant
    from tests.mutation.recording import Recorded

SUITE, UNIT, TIME, SURVIVED = "dev profile", "unit tests", "time", "survived"
_SLOWER = 5
"""Times the recorded processor seconds of an example or a test, after which it counts as a hang."""
_LEAST_SECONDS = 10
"""Processor seconds that each may take in any case."""
_WALL_SECONDS = 900
"""Seconds until a process that waits without using the processor counts as a hang."""
_MEMORY = 20 << 30
"""Bytes of address space of an attempt."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant."""

    file: str
    function: str
    line: int
    before: str
    after: str
    killed_by: str
    """``SUITE``, ``UNIT``, ``TIME`` or ``SURVIVED``."""
    check: str = ""
    """Check or test that failed, or was running."""
    message: str = ""
    num_examples: int = 0
    """Recorded examples that execute the statement."""
    num_examples_run: int = 0
    """Examples among them that were run."""
    num_tests: int | None = None
    """Unit tests that were run; None if there was no need yet."""
    seconds: float = 0.0
    """Processor seconds of all attempts."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.before, self.after

    @property
    def needs_tests(self) -> bool:
        """True for a mutant that no example killed and that no unit test was run on."""
        return self.killed_by == SURVIVED and self.num_tests is None

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Result:
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Result of one process: what failed, if anything did."""

    check: str = ""
    message: str = ""
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of what is run on one mutant."""

    examples: int
    """Examples of each target that execute the statement; 0 means all."""
    test_seconds: float
    """Recorded seconds of unit tests that execute the statement, cheapest first; 0 means all."""


@dataclass(slots=True)
class Bench:
    """Everything that mutants are tried with."""

    work: list[Recorded]
    """Examples of the suite, or unit tests."""
    functions: dict[tuple[str, str], list[FunctionType]]
    effort: Effort

    def try_examples(self, mutant: Mutant) -> Result:
        """Run the examples that execute the mutant's statement until one fails."""
        executing = [each for each in self.work if each.executes(mutant.file, mutant.lines)]
        chosen = _some_of_each(executing, self.effort.examples)
        file, function, before, after = mutant.key
        result = Result(
            file, function, min(mutant.lines), before, after, killed_by=SURVIVED,
            num_examples=len(executing), num_examples_run=len(chosen),
        )  # fmt: skip
        return self._tried(mutant, result, SUITE, chosen, _run_examples)

    def try_tests(self, mutant: Mutant, result: Result) -> Result:
        """Run the unit tests that execute the statement until one fails."""
        tests = self._tests_of(mutant)
        result = replace(result, num_tests=len(tests))
        return self._tried(mutant, result, UNIT, tests, _run_tests)

    def _tried(
        self,
        mutant: Mutant,
        result: Result,
        name: str,
        work: Sequence[Recorded],
        run: Callable[[Sequence[Recorded]], _Attempt],
    ) -> Result:
        if not work:
            return result
        before = _child_seconds()
        attempt = self._in_child(mutant, work, run)
        killed_by = name if attempt.check else SURVIVED
        return replace(
            result,
            killed_by=TIME if attempt.hung else killed_by,
            check=attempt.check,
            message=attempt.message,
            seconds=round(result.seconds + _child_seconds() - before, 2),
        )

    def _tests_of(self, mutant: Mutant) -> list[Recorded]:
        """Return the tests that execute the statement, cheapest first, up to the bound."""
        chosen: list[Recorded] = []
        seconds = 0.0
        executing = [each for each in self.work if each.executes(mutant.file, mutant.lines)]
        for each in sorted(executing, key=lambda test: test.seconds):
            seconds += each.seconds
            if chosen and 0 < self.effort.test_seconds < seconds:
                break
            chosen.append(each)
        return chosen

    def _in_child(
        self,
        mutant: Mutant,
        work: Sequence[Recorded],
        run: Callable[[Sequence[Recorded]], _Attempt],
    ) -> _Attempt:
        def attempt() -> str:
            _isolate()
            plant(mutant, ROOT, self.functions)
            return json.dumps(asdict(run(work)))

        ended = in_child(attempt, watch=os.getpid())
        if not ended.ended_by:
            return _Attempt(**json.loads(ended.answer))
        hung = ended.ended_by in ("SIGXCPU", "SIGALRM")
        return _Attempt("a process", f"it was ended by {ended.ended_by}", hung)


def _some_of_each(examples: list[Recorded], number: int) -> list[Recorded]:
    """Return up to ``number`` examples of each target, evenly over the search, cheapest first."""
    chosen: list[Recorded] = []
    for target in dict.fromkeys(each.target for each in examples):
        own = [each for each in examples if each.target == target]
        if number and len(own) > number:
            own = [own[at * len(own) // number] for at in range(number)]
        chosen += own
    return sorted(chosen, key=lambda each: each.seconds)


def _isolate() -> None:
    """Limit this process's wall seconds and memory, and drop its output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(_WALL_SECONDS)


def _limit_processor(work: Recorded) -> None:
    """Limit the processor seconds of an example or a test; SIGXCPU ends the process after them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = used.ru_utime + used.ru_stime + _LEAST_SECONDS + _SLOWER * work.seconds
    resource.setrlimit(resource.RLIMIT_CPU, (int(until), resource.RLIM_INFINITY))


def _run_examples(examples: Sequence[Recorded]) -> _Attempt:
    """Check the examples as a saved failure is replayed; compare the paths that they reach."""
    settings.set_current(Settings(search_seconds=0, seed=0))
    coverage.set_current(coverage.Coverage())
    with fast_interpreter():
        for each in examples:
            _limit_processor(each)
            try:
                reached = CHECKS[each.name](load_target(each.target), each.example)
            except Exception as error:
                message = str(error).partition("\n")[0] or type(error).__name__
                return _Attempt(each.name, message[:500])
            if missed := each.reached - Counter(reached).keys():
                return _Attempt("coverage", f"path not reached: {', '.join(sorted(missed))}")
    return _Attempt()


class _FirstFailure:
    """Plugin of pytest that limits each test, and keeps the first that fails."""

    def __init__(self, tests: Sequence[Recorded]) -> None:
        self.attempt = _Attempt()
        self._tests = {each.name: each for each in tests}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid in self._tests:
            _limit_processor(self._tests[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.attempt.check:
            lines = str(report.longrepr).splitlines()
            message = next((each for each in lines if each.startswith("E ")), "")
            self.attempt = _Attempt(report.nodeid, message[:500])


def _run_tests(tests: Sequence[Recorded]) -> _Attempt:
    first = _FirstFailure(tests)
    arguments = [*PYTEST_OPTIONS, "-x", "--no-header", "--no-summary"]
    status = pytest.main([*arguments, *(each.name for each in tests)], plugins=[first])
    if status and not first.attempt.check:
        raise RuntimeError(f"pytest ended with exit status {int(status)} without a failing test")
    return first.attempt


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
