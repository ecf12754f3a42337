"""A gate by itself: what workers saw adds up, and its problems fail a run that had none."""

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
    """Adds numbers up; more than 3 is a problem."""

    total = 0

    def to_json(self) -> int:
        return self.total

    def add(self, seen: int) -> None:
        self.total += seen

    def judge(self, *, passed: bool) -> Sequence[str]:
        self.config.judged.append((type(self).__name__, passed))  # type: ignore[attr-defined]
        return [f"{self.total} is too much"] if self.total > 3 else []

    def in_markdown(self) -> Iterable[str]:
        return [f"sum: {self.total}", *self.problems]

    def show(self, reporter: pytest.TerminalReporter) -> None:
        gate.show_problems(reporter, self.problems)


class Last(Sum):
    judged_last = True


def config(**more: Any) -> Any:
    return SimpleNamespace(stash=pytest.Stash(), judged=[], **more)


def finish(of: Any) -> pytest.ExitCode:
    session: Any = SimpleNamespace(config=of, exitstatus=pytest.ExitCode.OK)
    gate.finish(session)
    return pytest.ExitCode(session.exitstatus)


def test_a_run_has_one_gate_of_a_kind() -> None:
    run = config()
    assert Sum.of(run) is Sum.of(run)
    assert Sum.of(run) is not Last.of(run)


def test_a_worker_hands_over_what_its_controller_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    controller = config()
    for saw in (2, 3):
        worker = config(workeroutput={})
        Sum.of(worker).add(saw)
        assert finish(worker) is pytest.ExitCode.OK
        assert not worker.judged
        gate.merge_worker_output(controller, worker.workeroutput)
    assert finish(controller) is pytest.ExitCode.TESTS_FAILED
    assert Sum.of(controller).problems == ["5 is too much"]
    assert (tmp_path / "summary").read_text() == "sum: 5\n5 is too much\n"


def test_what_is_judged_last_knows_of_the_others_problems() -> None:
    run = config()
    Last.of(run)
    Sum.of(run).add(4)
    assert finish(run) is pytest.ExitCode.TESTS_FAILED
    assert run.judged == [("Sum", True), ("Last", False)]


@pytest.mark.parametrize("checked", [True, False])
def test_a_fixture_that_is_taken_must_be_used(checked: bool) -> None:
    item: Any = SimpleNamespace(funcargs={"roseinfer_tpot": SimpleNamespace(checked=checked)})
    if checked:
        gate.require_checks(item)
        return
    with pytest.raises(pytest.fail.Exception, match="took roseinfer_tpot and timed no step"):
        gate.require_checks(item)
