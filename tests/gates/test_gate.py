"""The base class of gates: results of workers add up, and problems fail the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer.gates import gate
from pytest_roseinfer.gates.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class Sum(Gate):
    """A gate that adds numbers and has a problem above 3."""

    total = 0

    def to_json(self) -> int:
        return self.total

    def add(self, number: int) -> None:
        self.total += number

    def judge(self, *, passed: bool) -> Sequence[str]:
        self.config.judged.append((type(self).__name__, passed))  # type: ignore[attr-defined]
        return [f"{self.total} is too much"] if self.total > 3 else []

    def in_markdown(self) -> Iterable[str]:
        return [f"sum: {self.total}", *self.problems]

    def show(self, reporter: pytest.TerminalReporter) -> None:
        gate.show_problems(reporter, self.problems)


class JudgedLast(Sum):
    judged_last = True


def config(**attributes: Any) -> Any:
    return SimpleNamespace(stash=pytest.Stash(), judged=[], **attributes)


def finish(run_config: Any) -> pytest.ExitCode:
    session: Any = SimpleNamespace(config=run_config, exitstatus=pytest.ExitCode.OK)
    gate.finish(session)
    return pytest.ExitCode(session.exitstatus)


def test_run_has_one_gate_of_a_class() -> None:
    run_config = config()
    assert Sum.of(run_config) is Sum.of(run_config)
    assert Sum.of(run_config) is not JudgedLast.of(run_config)


def test_results_of_workers_are_judged_by_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    controller = config()
    for number in (2, 3):
        worker = config(workeroutput={})
        Sum.of(worker).add(number)
        assert finish(worker) is pytest.ExitCode.OK
        assert not worker.judged
        gate.merge_worker_output(controller, worker.workeroutput)
    assert finish(controller) is pytest.ExitCode.TESTS_FAILED
    assert Sum.of(controller).problems == ["5 is too much"]
    assert (tmp_path / "summary").read_text() == "sum: 5\n5 is too much\n"


def test_gate_judged_last_gets_problems_of_earlier_gates() -> None:
    run_config = config()
    JudgedLast.of(run_config)
    Sum.of(run_config).add(4)
    assert finish(run_config) is pytest.ExitCode.TESTS_FAILED
    assert run_config.judged == [("Sum", True), ("JudgedLast", False)]


@pytest.mark.parametrize("checked", [True, False])
def test_requested_fixture_must_be_used(checked: bool) -> None:
    item: Any = SimpleNamespace(funcargs={"roseinfer_tpot": SimpleNamespace(checked=checked)})
    if checked:
        gate.require_checks(item)
        return
    with pytest.raises(pytest.fail.Exception, match="took roseinfer_tpot and timed no step"):
        gate.require_checks(item)
