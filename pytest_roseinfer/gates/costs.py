"""Gate that compares the work of a step, in exact counts, with its baseline."""

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
from pytest_roseinfer.gates.growth import measure_growth
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
    """Key of a baseline: test, step and device."""
    Test = tuple[str, str]
    """Key of a test: its file, and its name there."""


# Baseline file for the work of steps:
# ``{test: {step: {device: {"tokens": 3, versions: {group: {name: times}}}}}}``.
#
# A run reads and writes the entries of its own versions and leaves the others as they are.


NAME = "roseinfer-costs.json"
TOKENS = "tokens"
UPDATE = "--roseinfer-update-costs"


def name_of(file: Path, test_file: Path, test: str) -> str:
    """Return the name of a test in a baseline file, relative to that file."""
    return f"{os.path.relpath(test_file, file.parent).replace(os.sep, '/')}::{test}"


def read_baseline(file: Path, key: Where, versions: Mapping[str, str]) -> StepWork:
    """Return the recorded work for ``key`` and these versions; raise if it is missing."""
    test, step, device = key
    devices = read_steps(file).get(test, {}).get(step, {})
    entry = devices.get(device)
    if entry is None:
        others = f", which has one on {', '.join(sorted(devices))}" if devices else ""
        where_looked = f"in {file}{others}" if file.exists() else f"since {file} does not exist"
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
    """Convert work to the file's format, without groups whose counts are all 0."""
    entry: dict[str, Any] = {TOKENS: work.tokens}
    for name, group in GROUPS.items():
        counts = entry.setdefault(versions[group.depends_on], {})
        if nonzero := {thing: times for thing, times in work.groups[name].items() if times}:
            counts[name] = nonzero
    return entry


def update(file: Path, measured: Iterable[tuple[Where, Mapping[str, Any]]]) -> None:
    """Write measured baselines to a file, and keep its other entries."""
    steps = read_steps(file)
    for (test, step, device), new in measured:
        devices = steps.setdefault(test, {}).setdefault(step, {})
        old = devices.get(device, {})
        # Counts of other versions are useless once the step's number of tokens has changed.
        devices[device] = {**(old if old.get(TOKENS) == new[TOKENS] else {}), **new}
    write_steps(file, steps)


# Stale baselines: entries whose test or step was renamed or removed.


def is_of_whole_file(item: pytest.Item) -> bool:
    """Return True if all tests of this test's file were collected, before deselection."""
    arguments, here = item.config.args, item.config.invocation_params.dir
    in_part = {(here / each.partition("::")[0]).resolve() for each in arguments if "::" in each}
    return not item.config.getoption("lf", False) and item.path.resolve() not in in_part


def stale_baselines(
    file: Path, tests: Iterable[Test], measured: Collection[Where]
) -> Iterator[str]:
    """Yield the names of entries whose test is gone, or whose test no longer has the step.

    ``tests`` must be all tests of their files; ``measured`` are the steps of this run.
    """
    known_names = {name_of(file, Path(path), test) for path, test in tests}
    whole_files = {name.partition("::")[0] for name in known_names}
    ran = {(test, device) for test, _, device in measured}
    for test, steps in read_steps(file).items():
        test_file = test.partition("::")[0]
        renamed = test_file in whole_files and test not in known_names
        if renamed or not (file.parent / test_file).exists():
            yield test
            continue
        for step, devices in steps.items():
            here = [device for device in devices if (test, device) in ran]
            if any((test, step, device) not in measured for device in here):
                yield f"{test}, {step}"


# The gate.


_TITLE = "roseinfer: work of steps"
_COLLECTED = ("compared", "decreases", "increases", "bytes", "measured", "tests")


class CostGate(Gate):
    """Gate of the work of steps; tests add their results to the public attributes."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.compared = 0
        """Number of steps that did no more work than their baselines."""
        self.decreases: list[str] = []
        """Descriptions of decreased counts."""
        self.increases: list[str] = []
        """Descriptions of increased counts, as in the failures of their tests."""
        self.bytes: list[str] = []
        """Descriptions of steps' traffic next to the minimum."""
        self.measured: list[tuple[str, Where, dict[str, Any]]] = []
        """Baselines to write at the end of the run, each with its file."""
        self.tests: list[Test] = []
        """Tests of all files that were collected as a whole."""
        self._written: list[str] = []
        self._stale_baselines: list[str] = []

    def note_collected(self, item: pytest.Item) -> None:
        """Record a collected test, to find stale baselines."""
        if is_of_whole_file(item):
            self.tests.append((str(item.path), item.nodeid.partition("::")[2]))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COLLECTED}

    def add(self, collected: dict[str, Any]) -> None:
        for name in _COLLECTED:
            setattr(self, name, getattr(self, name) + collected[name])

    def judge(self, *, passed: bool) -> Sequence[str]:
        problem = self._write(passed=passed) or (self._unused_gate_error() if passed else "")
        return [problem] if problem else []

    def _write(self, *, passed: bool) -> str:
        """Write measured baselines; return an error message, or "".

        Report stale baselines only if all tests passed: each has then measured all of its steps.
        """
        by_file = defaultdict(list)
        for file, key, entry in self.measured:
            by_file[file].append((key, entry))
        for file, entries in sorted(by_file.items()):
            try:
                update(Path(file), entries)
            except (CannotCompare, OSError) as error:
                return f"{UPDATE}: {error}"
            self._written.append(file)
            removed = stale_baselines(Path(file), self.tests, [key for key, _ in entries])
            names = "; ".join(removed) if passed else ""
            if names:
                self._stale_baselines.append(
                    f"{file}: stale baselines that nothing checks: {names}; delete them there"
                )
        return ""

    def _unused_gate_error(self) -> str:
        """Return an error if the options request this gate and no test used it, or ""."""
        run_settings = settings.current()
        if run_settings.update_costs and not self.measured:
            return f"{UPDATE}: no test of this run measured a step"
        if run_settings.costs_requested and not (self.compared or self.measured):
            return "--roseinfer-costs: no test of this run compared a step with its baseline"
        return ""

    def in_markdown(self) -> Iterable[str]:
        messages = [*self.increases, *self.decreases, *self.problems]
        if messages or self.compared:
            yield from (f"### {_TITLE}", "", f"- {self._count()}", "")
            yield from (f"```\n{each}\n```" for each in [*self.bytes, *messages])

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if not (self.compared or self.bytes or self._written or self.problems):
            return
        reporter.section(_TITLE)
        if self.compared:
            reporter.line(self._count())
        for line in self.bytes:
            reporter.line(line)
        for line in self.decreases:
            reporter.line(line, yellow=True)
        if self.decreases:
            reporter.line(f"{UPDATE} writes these as the baselines", yellow=True)
        for file in self._written:
            reporter.line(f"written: {file}")
        for line in self._stale_baselines:
            reporter.line(line, yellow=True)
        show_problems(reporter, self.problems)

    def _count(self) -> str:
        return f"{self.compared} did no more than their baselines"


# Callbacks of tests, which are called without arguments.


def require_calls(needed: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Raise if one of these cannot be called without arguments; optional ones may be None."""
    present = {name: call for name, call in optional.items() if call is not None}
    for name, call in {**needed, **present}.items():
        _require_call(name, call)


def _require_call(name: str, call: object) -> None:
    if not callable(call):
        raise CannotCompare(f"{name}= must be a function, and is {call!r}")
    with suppress(ValueError):  # a C function without a signature
        signature = inspect.signature(call)
        try:
            signature.bind()
        except TypeError as error:
            raise CannotCompare(f"{name}= is called without arguments: {error}") from None


class Costs:
    """Comparisons of one test's steps with their baselines."""

    def __init__(self, item: pytest.Item, marked: Mapping[str, Sequence[str]]) -> None:
        """Make the gate of a test; ``marked`` holds the arguments of its markers."""
        self.checked: set[str] = set()
        self._config = item.config
        self._gate = CostGate.of(item.config)
        self._settings = settings.current()
        self._device = self._settings.device.partition(":")[0]
        self._marker_arguments = marked
        self._file = Path(self._settings.costs or item.path.parent / NAME)
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
        """Fail if ``step``, which generates ``tokens`` tokens, does more work than its baseline.

        The step runs six times. ``before`` runs before each and sets up the state that the step
        is about, such as a full block or shared blocks. ``counters`` returns counts of your own
        code, which must only rise. ``name`` is unique among the steps of a test.
        """
        with self._checking(name, tokens):
            require_calls({"step": step}, {"before": before, "counters": counters})
            own_code = OwnCode(self._marker_arguments.get("packages", ()))
            work = measure_work(Step(step, tokens, before, counters), own_code, self._device)
            self._compare(name, work, self._marker_arguments.get("must_not_drop", ()))

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

        The step runs three times, each time after ``before``, which restores the same contexts.
        ``weights`` are modules or tensors, and ``cache`` the tensors of keys and values, which a
        step must write in place: tensors that replace them are not recognised.
        ``context_bytes`` is called after a step and returns the bytes of keys and values of its
        sequences, including the new ones. The minimum is computed from it, and a step that moves
        less fails.
        """
        with self._checking(name, tokens):
            require_calls({"step": step, "context_bytes": context_bytes}, {"before": before})
            memory = StepMemory(weights, cache, context_bytes)
            traffic = measure_bytes(Step(step, tokens, before), memory, self._device)
            description = "\n".join(traffic.in_words())
            self._gate.bytes.append(f"{self._test}, {name}: {description}")
            self._compare(name, traffic.work, ())

    def check_growth(
        self,
        name: str,
        step: Callable[[], object],
        *,
        shorten: Callable[[], object],
        lengthen: Callable[[], object],
        added_tokens: int,
    ) -> None:
        """Fail if Python allocates a byte or more in ``step`` for each token of a context.

        The step runs nine times: after ``shorten``, and after ``lengthen``, which restores
        contexts that are each ``added_tokens`` longer. Take 1,000 or more, since a step also
        allocates a few hundred bytes by chance. There is no baseline. Memory of tensors does not
        count.
        """
        with self._checking(name):
            require_calls({"step": step, "shorten": shorten, "lengthen": lengthen}, {})
            if added_tokens < 1:
                raise CannotCompare(f"added_tokens={added_tokens}: must be 1 or more")
            growth = measure_growth(step, shorten, lengthen, added_tokens)
            if growth.per_token >= 1:
                message = f"{name} does more work in longer contexts: {growth.describe()}"
                self._gate.increases.append(f"{self._test}, {message}")
                pytest.fail(message, pytrace=False)

    @contextmanager
    def _checking(self, name: str, tokens: int = 1) -> Iterator[None]:
        """Run a check under a new name; a check that cannot compare fails the test."""
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: a decode step generates 1 token or more")
        if name in self.checked:
            raise ValueError(
                f"{self._test}: already checked a step named {name!r}; use another name"
            )
        self.checked.add(name)
        try:
            read_steps(self._file)  # fail this test, not the end of the run, if the file is broken
            with fast_interpreter() if self._settings.fast_interpreter else nullcontext():
                yield
        except CannotCompare as error:
            raise pytest.fail.Exception(f"{name}: {error}", pytrace=False) from None

    def _compare(self, name: str, work: StepWork, must_not_drop: Sequence[str]) -> None:
        key = (self._test, name, self._device)
        versions = versions_here(self._marker_arguments.get("keyed_by", ()))
        if self._settings.update_costs:
            require_counters(must_not_drop, work.groups["counters"])
            self._gate.measured.append((str(self._file), key, as_entry(work, versions)))
            self._keep(key, work, None)
            return
        baseline = read_baseline(self._file, key, versions)
        verdict = judge(work, baseline, must_not_drop)
        self._keep(key, work, verdict)
        lines = "\n  ".join(verdict.increases + verdict.decreases)
        if verdict.increases:
            message = f"{name} does more work than its baseline in {self._file}:\n  {lines}"
            self._gate.increases.append(f"{self._test}, {message}")
            pytest.fail(
                f"{message}\nIf that is intended, write the new baseline with {UPDATE}.",
                pytrace=False,
            )
        self._gate.compared += 1
        if lines:
            self._gate.decreases.append(f"{self._test}, {name} does less:\n  {lines}")

    def _keep(self, key: Where, work: StepWork, verdict: CostVerdict | None) -> None:
        if self._settings.timing.folder:
            from pytest_roseinfer.gates.history import HistoryGate

            HistoryGate.of(self._config).record_work(key, work, verdict)
