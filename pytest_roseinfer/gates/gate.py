"""Base class of gates, their place in a run, and baseline files."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Self

_GATES = pytest.StashKey[dict[type["Gate"], "Gate"]]()
_FROM_WORKER = "roseinfer_gates"
_MUST_CHECK = {"roseinfer_costs": "checked", "roseinfer_tpot": "timed"}
"""Fixtures that a test must use if it takes them, with the verb for the message."""


class CannotCompare(Exception):
    """Error that makes a comparison impossible; the message says why."""


class Gate(ABC):
    """A check that can fails a run besides its tests; subclasses collect and judge results."""

    judged_last = False
    """True for a gate that reports how the run ended, after the gates that can still fail it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.problems: Sequence[str] = ()

    @classmethod
    def of(cls, config: pytest.Config) -> Self:
        """Return this run's gate of this class; create it on first use."""
        gates = config.stash.setdefault(_GATES, {})
        if cls not in gates:
            gates[cls] = cls(config)
        gate = gates[cls]
        assert isinstance(gate, cls)
        return gate

    def to_json(self) -> Any:
        """Return the data that a worker sends to its controller; an empty value is not sent."""
        return None

    def add(self, data: Any) -> None:
        """Merge the data that a worker's gate returned from ``to_json``."""
        raise NotImplementedError

    @abstractmethod
    def judge(self, *, passed: bool) -> Sequence[str]:
        """Write files and return the problems; ``passed`` is True if no test failed."""

    @abstractmethod
    def in_markdown(self) -> Iterable[str]:
        """Return the lines of a GitHub step summary."""

    def figures(self) -> Mapping[str, str]:
        """Return figures for the run's HTML report, as SVG by title."""
        return {}

    @abstractmethod
    def show(self, reporter: pytest.TerminalReporter) -> None:
        """Write a section of the terminal summary, unless it would be empty."""


def show_problems(reporter: pytest.TerminalReporter, problems: Iterable[str]) -> None:
    for problem in problems:
        reporter.line(f"FAILED: {problem}", red=True)


def finish(session: pytest.Session) -> None:
    """Judge all gates of this run; in a worker, only send their data to the controller."""
    gates = _gates(session.config)
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_FROM_WORKER] = {
            f"{type(gate).__module__}:{type(gate).__qualname__}": collected
            for gate in gates
            if (collected := gate.to_json())
        }
        return
    for gate in gates:
        gate.problems = gate.judge(passed=session.exitstatus == pytest.ExitCode.OK)
        if gate.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if file := os.environ.get("GITHUB_STEP_SUMMARY"):
            with open(file, "a", encoding="utf-8") as summary:
                summary.writelines(f"{line}\n" for line in gate.in_markdown())


def merge_worker_output(config: pytest.Config, output: Mapping[str, Any]) -> None:
    """Merge a worker's data into the gates of the controller."""
    from pkgutil import resolve_name  # imported late: few runs have workers

    for name, collected in output.get(_FROM_WORKER, {}).items():
        resolve_name(name).of(config).add(collected)


def show(reporter: pytest.TerminalReporter) -> None:
    for gate in _gates(reporter.config):
        gate.show(reporter)


def figures_of(config: pytest.Config) -> dict[str, str]:
    """Return the figures of all gates of this run."""
    return {title: svg for gate in _gates(config) for title, svg in gate.figures().items()}


def require_checks(item: pytest.Item) -> None:
    """Fail a test that took a gate's fixture without using it."""
    fixtures = getattr(item, "funcargs", {})
    for fixture, done in _MUST_CHECK.items():
        if fixture in fixtures and not fixtures[fixture].checked:
            pytest.fail(f"the test took {fixture} and {done} no step with it", pytrace=False)


def _gates(config: pytest.Config) -> list[Gate]:
    return sorted(config.stash.get(_GATES, {}).values(), key=lambda gate: gate.judged_last)


# Baseline files, which are kept with the tests: ``{"format": 1, "steps": {test: ...}}``.


FORMAT = 1
"""Format version of baseline files; raised on incompatible changes."""
_LEAST_DEPTH = 3
"""Levels that must be JSON objects: all steps, those of a test, and each step."""

_REMEDY = "Restore it from git, or delete it and record all of its steps again"


def read_steps(file: Path) -> dict[str, Any]:
    """Return the steps of a baseline file; a missing file has none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{file} cannot be read: {error}. {_REMEDY}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or "steps" not in content:
        raise CannotCompare(f"{file} is not of format {FORMAT}. {_REMEDY}")
    steps: dict[str, Any] = content["steps"]
    if wrong := _wrong(steps, "steps", _LEAST_DEPTH):
        raise CannotCompare(f"{file}: {wrong}. {_REMEDY}")
    return steps


def _wrong(value: object, place: str, depth: int) -> str:
    """Describe the first value that is neither an object nor a number; "" if all are valid."""
    if isinstance(value, dict):
        within = (_wrong(each, f"{place}.{name}", depth - 1) for name, each in value.items())
        return next(filter(None, within), "")
    if depth > 0:
        return f"{place} must be an object"
    return "" if isinstance(value, int | float) else f"{place} must be a number"


def write_steps(file: Path, steps: dict[str, Any]) -> None:
    """Write the file atomically, so that no reader sees half of it."""
    text = json.dumps({"format": FORMAT, "steps": steps}, indent=1, sort_keys=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(file)


def terminal_of(config: pytest.Config) -> Callable[[str], None]:
    """Return a function that prints a line during a test at once, past pytest's capture."""

    def print_status(line: str) -> None:
        reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        if reporter is None:
            return
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.write_line(line)
            reporter.flush()

    return print_status
