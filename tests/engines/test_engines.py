"""Whole engines under test: a right one passes, and each wrong one is told what it does."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from pytest_roseinfer import EngineAdapter, RequestMix, conformance
from tests.engine_capabilities.engines.broken_engines import (
    ANeighboursTokenLeaksIn,
    CountsAnUndeclaredPath,
    EndsOthersWithTheCancelled,
    ForksKeepALease,
    ForksShareTheirDraws,
    GeneratesOneTokenMore,
    IgnoresCancel,
    KeepsALease,
    LetsSomebodyWaitForever,
    LosesTheLastToken,
    NeverGuesses,
    RaisesInAStep,
    RefusesWhatFits,
    TakesAnothersPrefix,
    TakesATokenBack,
)
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyForks
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.project import Project

FEW = ("--roseinfer-examples=60", "--roseinfer-seed=2")
WRONG_TOKEN = r"request \d, token \d: \d+; alone it gets \d+"
REASONS = {
    ANeighboursTokenLeaksIn: WRONG_TOKEN,
    TakesAnothersPrefix: WRONG_TOKEN,
    LosesTheLastToken: r"request \d ended after \d+ tokens; alone it gets \d+",
    GeneratesOneTokenMore: r"request \d, token \d+: \d+; alone it has ended by then",
    TakesATokenBack: r"request \d had \d+ tokens and has \d+",
    IgnoresCancel: r"request \d was cancelled and goes on",
    EndsOthersWithTheCancelled: r"request \d ended after \d+ tokens; alone it gets \d+",
    LetsSomebodyWaitForever: r"requests \[\d(, \d)*\] have not ended after \d+ steps",
    RaisesInAStep: "a step raised IndexError: no row 2",
    RefusesWhatFits: r"request \d was refused: ValueError: too long",
    KeepsALease: r"every request has ended, and the engine still holds -?\d+ leases",
    CountsAnUndeclaredPath: "'shortcut' was counted, and is in neither paths nor conditions",
    ForksShareTheirDraws: r"fork [1-9] of request 0's prompt got \[.*\]; alone it gets \[.*\]",
    ForksKeepALease: "every fork was released, and the engine still holds 1 leases",
}


@pytest.fixture(autouse=True)
def _keep_the_kernel_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """``conformance()`` chooses one for the process; that of these tests has others to run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def engines(project: Project) -> Project:
    """A project that imports the engines from where they are."""
    project.monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return project


def file_testing(*adapters: type[EngineAdapter]) -> str:
    """Return the text of a test file."""
    imports = [f"from {each.__module__} import {each.__name__}" for each in adapters]
    classes = [f"Test{each.__name__} = conformance({each.__name__})" for each in adapters]
    return "\n".join(["from pytest_roseinfer import conformance", *imports, *classes])


def failures(project: Project) -> dict[str, str]:
    """Return what each failed test says, by the name of the adapter."""
    cases = ElementTree.parse(project.path / "results.xml").iter("testcase")
    return {
        case.attrib["classname"].rpartition(".Test")[2]: failure.attrib["message"]
        for case in cases
        for failure in case.iter("failure")
    }


def test_an_engine_that_is_right_passes_on_all_its_paths(engines: Project) -> None:
    engines.write(test_toy=file_testing(ToyAdapter, ToyForks))
    result = engines.pytest("-W", "error", "-rs", *FEW)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=3, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "*= roseinfer: tests.engine_capabilities.engines.toy_engine:ToyAdapter *=*",
            "96 mixes of requests of *",
            "largest: 3 rows, 48 tokens",
            "tested: make 98, submit *, step *, tokens *, is_finished *, find_leaks *",
            "path * together * by itself * equal",
            "path * from a prefix * from the start * equal",
            "condition * crowded * met",
            "*= roseinfer: tests.engine_capabilities.engines.toy_engine:ToyForks *=*",
            "105 mixes of requests of *",
            "tested: *, generate_alone *, fork *",
            "SKIPPED * ToyAdapter does not offer fork()",
        ]
    )


def test_each_that_is_not_is_rejected_for_what_it_does(engines: Project) -> None:
    engines.write(test_broken=file_testing(*REASONS, NeverGuesses))
    engines.judge_after(96)
    result = engines.pytest("--junitxml=results.xml", *FEW)
    found = failures(engines)
    unlike = {
        each.__name__: found.get(each.__name__)
        for each, said in REASONS.items()
        if not re.fullmatch(said, found.get(each.__name__, ""))
    }
    assert unlike == {}
    # What never happens cannot be wrong: no test fails, and the run does.
    assert "NeverGuesses" not in found
    result.stdout.fnmatch_lines(
        [
            "*broken_engines:NeverGuesses *=*",
            "path * guessed * by itself * 0 *NOT REACHED",
            "FAILED: path 'guessed' was never reached, by none of *",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def how_to() -> tuple[str, str]:
    """Return the example of docs/how-to.md for engines, and what follows it."""
    page = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    section = page.partition("### Test a whole engine\n")[2].partition("\n## ")[0]
    code, after = section.partition("```python\n")[2].split("```")
    return code, after


def test_the_example_works_as_it_is_printed(project: Project, how_to: tuple[str, str]) -> None:
    project.write(test_my_engine=how_to[0])
    result = project.pytest("-W", "error", "--roseinfer-seed=1")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["160 mixes of requests of *", "path * batch * single * equal"])


def test_the_example_fails_as_it_says(project: Project, how_to: tuple[str, str]) -> None:
    code, after = how_to
    broken, right, said = re.findall(r"`([^`]*)`", after)[:3]
    assert code.count(right) == 1
    project.write(test_my_engine=code.replace(right, broken))
    project.pytest(*FEW, "--junitxml=results.xml").assert_outcomes(failed=1, skipped=2)
    # The numbers are those of one of the smallest mixes.
    alike = re.sub(r"\d+", r"\\d+", " ".join(said.split()))
    assert re.fullmatch(alike, failures(project)["MyEngine"])


def test_it_says_what_an_adapter_lacks() -> None:
    class Lacking(EngineAdapter):
        def make(self, mix: RequestMix) -> None: ...

        def step(self) -> None: ...

    said = "Lacking must define submit, tokens, is_finished, find_leaks, path_counts"
    with pytest.raises(TypeError, match=said):
        conformance(Lacking)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [(LosesTheLastToken, "request "), (ForksShareTheirDraws, "fork ")],  # run_mix and run_forks
)
def test_a_failing_mix_is_said_once_and_runs_again_until_it_is_mended(
    engines: Project, adapter: type[EngineAdapter], said: str
) -> None:
    engines.write(test_it=file_testing(adapter))
    shown = engines.pytest(*FEW).stdout.str().partition("= FAILURES =")[2]
    (line,) = {line for line in shown.splitlines() if line.startswith(said)}
    assert shown.count(f"{line}\n\na cache of ") == 1
    for noise in ("Traceback", "Failing test case", "RequestMix(", "engines/run.py"):
        assert noise not in shown
    trace, script = engines.shown(".json"), engines.shown(".py")
    name = f"{adapter.__module__}:{adapter.__qualname__}"
    again = ["--roseinfer-replay", str(trace), "--roseinfer-target", name]
    assert f"replay with: pytest {' '.join(again)}\n         or: python {script}" in shown
    broken = engines.pytest(*again)
    assert (broken.ret, broken.stdout.str().count(line)) == (pytest.ExitCode.TESTS_FAILED, 1)
    assert f"MixDivergence: {line}\n" in engines.run_script().stderr

    right = ToyForks if adapter.defines("fork") else ToyAdapter
    for file in (trace, script):
        old, new = (f"{each.__module__}:{each.__qualname__}" for each in (adapter, right))
        text = file.read_text().replace("broken_engines.py", "toy_engine.py")
        file.write_text(text.replace(old, new))
    trusted = engines.pytest("--roseinfer-replay", str(trace), "--roseinfer-replay-trust")
    assert trusted.ret == pytest.ExitCode.OK
    mended = engines.run_script()
    assert (mended.stdout, mended.stderr) == ("it passed: nothing differed\n", "")


def test_it_says_what_a_path_lacks() -> None:
    mine = type("Mine", (ToyAdapter,), {"paths": {"fast": "slow"}})
    with pytest.raises(TypeError, match=re.escape("Mine.paths['fast'] is 'slow'")):
        conformance(mine)
