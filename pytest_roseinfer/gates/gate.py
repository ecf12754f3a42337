"""A gate collects what the tests of a run found, and can fail a run whose tests all passed.

The first test that needs a gate makes it, or the command line asks for it. Each worker of
pytest-xdist has its own gates; the controller adds them up and judges once.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Self

_GATES = pytest.StashKey[dict[type["Gate"], "Gate"]]()
_FROM_WORKER = "roseinfer_gates"
_MUST_CHECK = {"roseinfer_costs": "checked", "roseinfer_tpot": "timed"}
"""A test that takes one of these fixtures must do this to a step with it."""


class CannotCompare(Exception):
    """A step cannot be compared with anything; the message says why."""


class Gate(ABC):
    """A subclass says what it collects and when that fails the run."""

    judged_last = False
    """A gate that reports how the run ended must be judged after those that can still fail it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.problems: Sequence[str] = ()

    @classmethod
    def of(cls, config: pytest.Config) -> Self:
        """Return this run's gate, and make it if there is none yet."""
        gates = config.stash.setdefault(_GATES, {})
        if cls not in gates:
            gates[cls] = cls(config)
        gate = gates[cls]
        assert isinstance(gate, cls)
        return gate

    def to_json(self) -> Any:
        """Return what a worker sends to its controller; nothing is sent if that is empty."""
        return None

    def add(self, seen: Any) -> None:
        """Add what ``to_json`` of a worker's gate returned."""
        raise NotImplementedError

    @abstractmethod
    def judge(self, *, passed: bool) -> Sequence[str]:
        """Write files and return the problems; ``passed`` says that no test failed."""

    @abstractmethod
    def in_markdown(self) -> Iterable[str]:
        """Return the lines of a GitHub step summary."""

    def figures(self) -> Mapping[str, str]:
        """Return figures for the page of the run, as SVG, by their titles."""
        return {}

    @abstractmethod
    def show(self, reporter: pytest.TerminalReporter) -> None:
        """Write a section of the terminal's summary, if there is anything to say."""


def show_problems(reporter: pytest.TerminalReporter, problems: Iterable[str]) -> None:
    for problem in problems:
        reporter.line(f"FAILED: {problem}", red=True)


def finish(session: pytest.Session) -> None:
    """Judge every gate of this run; a worker only sends what it saw."""
    gates = _gates(session.config)
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_FROM_WORKER] = {
            f"{type(gate).__module__}:{type(gate).__qualname__}": seen
            for gate in gates
            if (seen := gate.to_json())
        }
        return
    for gate in gates:
        gate.problems = gate.judge(passed=session.exitstatus == pytest.ExitCode.OK)
        if gate.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if file := os.environ.get("GITHUB_STEP_SUMMARY"):
            with open(file, "a", encoding="utf-8") as summary:
                summary.writelines(f"{line}\n" for line in gate.in_markdown())


def take_over(config: pytest.Config, output: Mapping[str, Any]) -> None:
    """Add what a worker saw to the gates of its controller."""
    from pkgutil import resolve_name  # few runs have workers, and all import this file

    for name, seen in output.get(_FROM_WORKER, {}).items():
        resolve_name(name).of(config).add(seen)


def show(reporter: pytest.TerminalReporter) -> None:
    for gate in _gates(reporter.config):
        gate.show(reporter)


def figures_of(config: pytest.Config) -> dict[str, str]:
    """Return the figures of all gates of this run."""
    return {title: drawn for gate in _gates(config) for title, drawn in gate.figures().items()}


def require_checks(item: pytest.Item) -> None:
    """Fail a test that took a gate's fixture and never used it."""
    taken = getattr(item, "funcargs", {})
    for fixture, done in _MUST_CHECK.items():
        if fixture in taken and not taken[fixture].checked:
            pytest.fail(f"the test took {fixture} and {done} no step with it", pytrace=False)


def _gates(config: pytest.Config) -> list[Gate]:
    return sorted(config.stash.get(_GATES, {}).values(), key=lambda gate: gate.judged_last)
