"""The gate that compares the work of a step with its baseline, to the call."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates.bytes_moved import StepMemory, measure_bytes
from pytest_roseinfer.gates.gate import CannotCompare, Gate, read_steps, show_problems, write_steps
from pytest_roseinfer.gates.step_work import (
    GROUPS,
    OwnCode,
    Step,
    StepWork,
    judge,
    measure_work,
    require_counters,
    versions_here,
)
from pytest_roseinfer.run.interpreter import fast_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from pytest_roseinfer.gates.bytes_moved import Weights
    from pytest_roseinfer.gates.step_work import CostVerdict

    Where = tuple[str, str, str]
    """Test, step and device."""
    Test = tuple[str, str]
    """The file of a test, and its name in there."""


# The file of baselines for the work of steps.
#
# ``{test: {step: {device: {"tokens": 3, versions: {group: {name: times}}}}}}``. A run reads and
# writes the entries of its own versions and leaves the others as they are.


NAME = "roseinfer-costs.json"
TOKENS = "tokens"
UPDATE = "--roseinfer-update-costs"


def name_of(file: Path, test_file: Path, test: str) -> str:
    """Return the name of a test in a file of baselines, which is the same wherever both lie."""
    return f"{os.path.relpath(test_file, file.parent).replace(os.sep, '/')}::{test}"


def read_baseline(file: Path, where: Where, versions: Mapping[str, str]) -> StepWork:
    """Return the work that was recorded for ``where`` with these versions."""
    test, step, device = where
    devices = read_steps(file).get(test, {}).get(step, {})
    entry = devices.get(device)
    if entry is None:
        others = f", which has one on {', '.join(sorted(devices))}" if devices else ""
        where_looked = f"in {file}{others}" if file.exists() else f"since {file} is not there"
        raise CannotCompare(
            f"no baseline for {step!r} of {test} on {device} {where_looked}: {UPDATE} records one"
        )
    if not isinstance(entry, dict) or TOKENS not in entry:
        raise CannotCompare(
            f"{file}: steps.{test}.{step}.{device} has no {TOKENS}: {UPDATE} adds it"
        )
    groups: dict[str, Mapping[str, int]] = {}
    for name, group in GROUPS.items():
        version = versions[group.depends_on]
        if version not in entry:
            recorded = sorted(set(entry) - {TOKENS, *versions.values()})
            raise CannotCompare(
                f"no baseline for {step!r} of {test} with {version} in {file}, which has "
                f"{'; '.join(recorded) or 'no other'}: {UPDATE} adds it"
            )
        groups[name] = entry[version].get(name, {})
    return StepWork(entry[TOKENS], groups)


def as_entry(work: StepWork, versions: Mapping[str, str]) -> dict[str, Any]:
    """Lay the work out as in the file, which has no line for a group that counted nothing."""
    entry: dict[str, Any] = {TOKENS: work.tokens}
    for name, group in GROUPS.items():
        counts = entry.setdefault(versions[group.depends_on], {})
        if happened := {what: times for what, times in work.groups[name].items() if times}:
            counts[name] = happened
    return entry


def update(file: Path, measured: Iterable[tuple[Where, Mapping[str, Any]]]) -> None:
    """Put what was measured into a file, beside all else that it holds."""
    steps = read_steps(file)
    for (test, step, device), new in measured:
        devices = steps.setdefault(test, {}).setdefault(step, {})
        old = devices.get(device, {})
        # Counts of other versions are useless once the step brings another number of tokens.
        devices[device] = {**(old if old.get(TOKENS) == new[TOKENS] else {}), **new}
    write_steps(file, steps)


# Entries of a file of baselines that no test stands for any more: it, or its step, was renamed.


def is_of_whole_file(item: pytest.Item) -> bool:
    """Return True if all tests of this one's file are collected, whatever is deselected later."""
    said, here = item.config.args, item.config.invocation_params.dir
    in_part = {(here / each.partition("::")[0]).resolve() for each in said if "::" in each}
    return not item.config.getoption("lf", False) and item.path.resolve() not in in_part


def left_behind(file: Path, tests: Iterable[Test], measured: Collection[Where]) -> Iterator[str]:
    """Yield the names of entries: of tests that are gone, and of steps that a test has no more.

    ``tests`` are all of their files, and ``measured`` is what this run found.
    """
    known = {name_of(file, Path(path), test) for path, test in tests}
    whole_files = {name.partition("::")[0] for name in known}
    ran = {(test, device) for test, _, device in measured}
    for test, steps in read_steps(file).items():
        test_file = test.partition("::")[0]
        renamed = test_file in whole_files and test not in known
        if renamed or not (file.parent / test_file).exists():
            yield test
            continue
        for step, devices in steps.items():
            here = [device for device in devices if (test, device) in ran]
            if any((test, step, device) not in measured for device in here):
                yield f"{test}, {step}"


# The gate of work compares steps with their baselines, or writes new baselines.


_TITLE = "roseinfer: work of steps"
_COLLECTED = ("compared", "less", "more", "bytes", "measured", "tests")


class CostGate(Gate):
    """Tests add what they find to the public attributes."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.compared = 0
        """How many steps did no more than their baselines."""
        self.less: list[str] = []
        """What steps did less of, in words."""
        self.more: list[str] = []
        """What steps did more of, as the failures of their tests say."""
        self.bytes: list[str] = []
        """What steps moved, beside the least, in words."""
        self.measured: list[tuple[str, Where, dict[str, Any]]] = []
        """The baselines to write at the end of the run, each with its file."""
        self.tests: list[Test] = []
        """The tests of this run's files, where all of a file's were collected."""
        self._written: list[str] = []
        self._left_behind: list[str] = []

    def note_collected(self, item: pytest.Item) -> None:
        """Note that there is such a test."""
        if is_of_whole_file(item):
            self.tests.append((str(item.path), item.nodeid.partition("::")[2]))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COLLECTED}

    def add(self, seen: dict[str, Any]) -> None:
        for name in _COLLECTED:
            setattr(self, name, getattr(self, name) + seen[name])

    def judge(self, *, passed: bool) -> Sequence[str]:
        problem = self._write(passed=passed) or (self._nothing_done() if passed else "")
        return [problem] if problem else []

    def _write(self, *, passed: bool) -> str:
        """Write what was measured; return why not all of it was, if so.

        If all passed, each test has measured all of its steps, and those that it has no more show.
        """
        by_file = defaultdict(list)
        for file, where, entry in self.measured:
            by_file[file].append((where, entry))
        for file, entries in sorted(by_file.items()):
            try:
                update(Path(file), entries)
            except (CannotCompare, OSError) as error:
                return f"{UPDATE}: {error}"
            self._written.append(file)
            gone = left_behind(Path(file), self.tests, [where for where, _ in entries])
            names = "; ".join(gone) if passed else ""
            if names:
                self._left_behind.append(
                    f"{file} has baselines that nothing checks: {names}. Delete them there"
                )
        return ""

    def _nothing_done(self) -> str:
        """Return why a run that asked for this gate did not apply it, if so."""
        asked = settings.current()
        if asked.update_costs and not self.measured:
            return f"{UPDATE}: no test of this run measured a step"
        if asked.costs_requested and not (self.compared or self.measured):
            return "--roseinfer-costs: no test of this run compared a step with its baseline"
        return ""

    def in_markdown(self) -> Iterable[str]:
        said = [*self.more, *self.less, *self.problems]
        if said or self.compared:
            yield from (f"### {_TITLE}", "", f"- {self._count()}", "")
            yield from (f"```\n{each}\n```" for each in [*self.bytes, *said])

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if not (self.compared or self.bytes or self._written or self.problems):
            return
        reporter.section(_TITLE)
        if self.compared:
            reporter.line(self._count())
        for line in self.bytes:
            reporter.line(line)
        for line in self.less:
            reporter.line(line, yellow=True)
        if self.less:
            reporter.line(f"{UPDATE} makes these their baselines", yellow=True)
        for file in self._written:
            reporter.line(f"written: {file}")
        for line in self._left_behind:
            reporter.line(line, yellow=True)
        show_problems(reporter, self.problems)

    def _count(self) -> str:
        return f"{self.compared} did no more than their baselines say"


# What a test gives to be called gets no arguments; what cannot be called so is refused.


def require_calls(needed: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Raise where what was given by one of these names cannot be called; None may be optional."""
    given = {name: call for name, call in optional.items() if call is not None}
    for name, call in {**needed, **given}.items():
        _require_call(name, call)


def _require_call(name: str, call: object) -> None:
    if not callable(call):
        raise CannotCompare(f"{name}= must be a function, and is {call!r}")
    with suppress(ValueError):  # of a function in C that does not say what it takes
        signature = inspect.signature(call)
        try:
            signature.bind()
        except TypeError as error:
            raise CannotCompare(f"{name}= is called without arguments: {error}") from None


class Costs:
    """Compares steps of one test with their baselines."""

    def __init__(self, item: pytest.Item, marked: Mapping[str, Sequence[str]]) -> None:
        """``marked`` holds the arguments of the test's markers."""
        self.checked: set[str] = set()
        self._config = item.config
        self._gate = CostGate.of(item.config)
        self._asked = settings.current()
        self._device = self._asked.device.partition(":")[0]
        self._marked = marked
        self._file = Path(self._asked.costs or item.path.parent / NAME)
        self._test = name_of(self._file, item.path, item.nodeid.partition("::")[2])

    def check(
        self,
        name: str,
        step: Callable[[], object],
        *,
        tokens: int,
        before: Callable[[], object] | None = None,
        counters: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """Fail if ``step``, which brings ``tokens`` tokens, does more than its baseline.

        The step runs six times. ``before`` runs ahead of each and sets up what the step is
        about: the end of a block, say, or shared blocks. ``counters`` returns what your code
        counts itself, numbers that only ever rise. ``name`` tells the steps of a test apart.
        """
        with self._checking(name, tokens):
            require_calls({"step": step}, {"before": before, "counters": counters})
            own = OwnCode(self._marked.get("packages", ()))
            work = measure_work(Step(step, tokens, before, counters), own, self._device)
            self._compare(name, work, self._marked.get("must_not_drop", ()))

    def check_bytes(
        self,
        name: str,
        step: Callable[[], object],
        *,
        tokens: int,
        weights: Weights,
        cache: Iterable[Tensor],
        context_bytes: Callable[[], int],
        before: Callable[[], object] | None = None,
    ) -> None:
        """Fail if the operations and kernels of ``step`` must move more bytes than its baseline.

        The step runs three times, each time after ``before``, which brings it to the same
        contexts. ``weights`` are modules or tensors, and ``cache`` the tensors of keys and
        values, which a step writes in place: one that it replaces is no longer known as theirs.
        ``context_bytes`` is called behind a step and returns how many bytes the keys and values
        of its sequences take, the new ones included: the least is worked out from it, and a step
        that moves less fails.
        """
        with self._checking(name, tokens):
            require_calls({"step": step, "context_bytes": context_bytes}, {"before": before})
            memory = StepMemory(weights, cache, context_bytes)
            found = measure_bytes(Step(step, tokens, before), memory, self._device)
            said = "\n".join(found.in_words())
            self._gate.bytes.append(f"{self._test}, {name}: {said}")
            self._compare(name, found.work, ())

    @contextmanager
    def _checking(self, name: str, tokens: int) -> Iterator[None]:
        """Begin a check by a new name; one that can compare nothing fails the test."""
        if tokens < 1:
            raise ValueError(f"a step that brings {tokens} tokens is no decode step")
        if name in self.checked:
            raise ValueError(f"{self._test} has checked a step by the name {name!r} already")
        self.checked.add(name)
        try:
            read_steps(self._file)  # a broken file fails this test, and not the end of the run
            with fast_interpreter() if self._asked.fast_interpreter else nullcontext():
                yield
        except CannotCompare as error:
            raise pytest.fail.Exception(f"{name}: {error}", pytrace=False) from None

    def _compare(self, name: str, work: StepWork, must_not_drop: Sequence[str]) -> None:
        where = (self._test, name, self._device)
        versions = versions_here(self._marked.get("keyed_by", ()))
        if self._asked.update_costs:
            require_counters(must_not_drop, work.groups["counters"])
            self._gate.measured.append((str(self._file), where, as_entry(work, versions)))
            self._keep(where, work, None)
            return
        was = read_baseline(self._file, where, versions)
        verdict = judge(work, was, must_not_drop)
        self._keep(where, work, verdict)
        lines = "\n  ".join(verdict.worse + verdict.less)
        if verdict.worse:
            more = f"{name} does more work than its baseline in {self._file}:\n  {lines}"
            self._gate.more.append(f"{self._test}, {more}")
            pytest.fail(f"{more}\nIf that is meant, {UPDATE} makes it the baseline.", pytrace=False)
        self._gate.compared += 1
        if lines:
            self._gate.less.append(f"{self._test}, {name} does less:\n  {lines}")

    def _keep(self, where: Where, work: StepWork, verdict: CostVerdict | None) -> None:
        if self._asked.timing.folder:
            from pytest_roseinfer.gates.history import HistoryGate

            HistoryGate.of(self._config).keep_work(where, work, verdict)
