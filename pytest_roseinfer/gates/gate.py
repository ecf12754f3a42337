"""The contract of a gate, what its two outcomes are, and the files of baselines."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
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


# Files of baselines, which are kept with the tests: ``{"format": 1, "steps": {test: ...}}``.


FORMAT = 1
"""This number rises when a reader would misunderstand older files."""
_LEAST_DEPTH = 3
"""The steps, a test's, and what is known of one are objects."""

_REMEDY = "Restore it from git, or delete it and record all of its steps anew"


def read_steps(file: Path) -> dict[str, Any]:
    """Return what a file says about steps; a file that does not exist says nothing."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{file} cannot be read: {error}. {_REMEDY}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or "steps" not in found:
        raise CannotCompare(f"{file} is not of format {FORMAT}. {_REMEDY}")
    steps: dict[str, Any] = found["steps"]
    if wrong := _wrong(steps, "steps", _LEAST_DEPTH):
        raise CannotCompare(f"{file}: {wrong}. {_REMEDY}")
    return steps


def _wrong(found: object, place: str, depth: int) -> str:
    """Say at which place there is neither an object nor a number, or return an empty text."""
    if isinstance(found, dict):
        within = (_wrong(each, f"{place}.{name}", depth - 1) for name, each in found.items())
        return next(filter(None, within), "")
    if depth > 0:
        return f"{place} must be an object"
    return "" if isinstance(found, int | float) else f"{place} must be a number"


def write_steps(file: Path, steps: dict[str, Any]) -> None:
    """Write the file in one move, so that nobody reads half of it."""
    text = json.dumps({"format": FORMAT, "steps": steps}, indent=1, sort_keys=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(file)
