"""Engines under test: a right one passes, and each broken one fails with its reason."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from pytest_roseinfer import EngineAdapter, RequestMix, conformance
from tests.engine_capabilities.engines.broken_engines import (
    CountsAnUndeclaredPath,
    EndsOthersOnCancel,
    ForksKeepALease,
    ForksShareTheirDraws,
    GeneratesOneTokenMore,
    IgnoresCancel,
    KeepsALease,
    LosesTheLastToken,
    NeverTakesADeclaredPath,
    RaisesInAStep,
    RefusesAFittingRequest,
    RemovesATokenShown,
    ReturnsANeighboursToken,
    StarvesARequest,
    UsesAnotherPrefix,
)
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyForks
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.project import Project

SHORT_SEARCH = ("--roseinfer-examples=60", "--roseinfer-seed=1")
WRONG_TOKEN = r"request \d, token \d: \d+; alone it gets \d+"
REASONS = {
    ReturnsANeighboursToken: WRONG_TOKEN,
    UsesAnotherPrefix: WRONG_TOKEN,
    LosesTheLastToken: r"request \d ended after \d+ tokens; alone it gets \d+",
    GeneratesOneTokenMore: r"request \d, token \d+: \d+; alone it has ended by then, "
    r"at its limit of \d+ tokens?",
    RemovesATokenShown: r"request \d had \d+ tokens and has \d+",
    IgnoresCancel: r"request \d was cancelled and goes on",
    EndsOthersOnCancel: r"request \d ended after \d+ tokens; alone it gets \d+",
    StarvesARequest: r"requests \[\d(, \d)*\] have not ended after \d+ steps",
    RaisesInAStep: "a step raised IndexError: no row 2",
    RefusesAFittingRequest: r"request \d was refused: ValueError: too long",
    KeepsALease: r"every request has ended, and the engine still holds -?\d+ leases",
    CountsAnUndeclaredPath: "'shortcut' was counted, and is in neither paths nor conditions",
    ForksShareTheirDraws: r"fork [1-9] of request 0's prompt got \[.*\]; alone it gets \[.*\]",
    ForksKeepALease: "every fork was released, and the engine still holds 1 leases",
}


@pytest.fixture(autouse=True)
def _keep_the_kernel_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the kernel runtime, which ``conformance()`` would choose for the whole process."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def engines(project: Project) -> Project:
    """Return a project that can import the engines of these tests."""
    project.monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return project


def file_testing(*adapters: type[EngineAdapter]) -> str:
    """Return the text of a test file for some adapters."""
    imports = [f"from {each.__module__} import {each.__name__}" for each in adapters]
    classes = [f"Test{each.__name__} = conformance({each.__name__})" for each in adapters]
    return "\n".join(["from pytest_roseinfer import conformance", *imports, *classes])


def failures(project: Project) -> dict[str, str]:
    """Return the message of each failed test, by the name of the adapter."""
    cases = ElementTree.parse(project.path / "results.xml").iter("testcase")
    return {
        case.attrib["classname"].rpartition(".Test")[2]: failure.attrib["message"]
        for case in cases
        for failure in case.iter("failure")
    }


@pytest.mark.slow
def test_right_engine_passes_on_all_its_paths(engines: Project) -> None:
    engines.write(test_toy=file_testing(ToyAdapter, ToyForks))
    result = engines.pytest("-v", "-W", "error", "-rs", *SHORT_SEARCH)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=3, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "*= roseinfer: tests.engine_capabilities.engines.toy_engine:ToyAdapter *=*",
            "* mixes of requests of up to *",
            "largest: 3 rows, 48 tokens",
            "tested: make *, submit *, step *, tokens *, is_finished *, find_leaks *",
            "path * together * by itself * equal",
            "path * from a prefix * from the start * equal",
            "condition * crowded * met",
            "*= roseinfer: tests.engine_capabilities.engines.toy_engine:ToyForks *=*",
            "* mixes of requests of up to *",
            "tested: *, generate_alone *, fork *",
            "SKIPPED * ToyAdapter does not offer fork()",
        ]
    )


@pytest.mark.slow
def test_broken_engine_is_rejected_with_its_reason(engines: Project) -> None:
    engines.write(test_broken=file_testing(*REASONS, NeverTakesADeclaredPath))
    engines.set_conclusive_examples(96)
    result = engines.pytest("-v", "--junitxml=results.xml", *SHORT_SEARCH)
    messages = failures(engines)
    wrong_messages = {
        each.__name__: messages.get(each.__name__)
        for each, message in REASONS.items()
        if not re.fullmatch(message, messages.get(each.__name__, ""))
    }
    assert wrong_messages == {}
    # The run fails, and no test: a path that never runs cannot be wrong.
    assert "NeverTakesADeclaredPath" not in messages
    result.stdout.fnmatch_lines(
        [
            "*broken_engines:NeverTakesADeclaredPath *=*",
            "path * guessed * by itself * 0 *NOT REACHED",
            "FAILED: path 'guessed' was never reached, by none of *",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def how_to() -> tuple[str, str]:
    """Return the engine example of docs/how-to/engines.md, and the text after it."""
    page = (ROOT / "docs" / "how-to" / "engines.md").read_text(encoding="utf-8")
    code, after = page.partition("```python\n")[2].split("```")
    return code, after


def test_engine_example_of_the_how_to_runs(project: Project, how_to: tuple[str, str]) -> None:
    project.write(test_my_engine=how_to[0])
    result = project.pytest("-v", "-W", "error", "--roseinfer-seed=1")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["160 mixes of requests of *", "path * batch * single * equal"])


def test_engine_example_of_the_how_to_fails_as_documented(
    project: Project, how_to: tuple[str, str]
) -> None:
    code, after = how_to
    broken, right, message = re.findall(r"`([^`]*)`", after)[:3]
    assert code.count(right) == 1
    project.write(test_my_engine=code.replace(right, broken))
    project.pytest(*SHORT_SEARCH, "--junitxml=results.xml").assert_outcomes(failed=1, skipped=2)
    # The numbers are those of one of the minimal mixes.
    pattern = re.sub(r"\d+", r"\\d+", " ".join(message.split()))
    assert re.fullmatch(pattern, failures(project)["MyEngine"])


def test_missing_methods_of_an_adapter_are_named() -> None:
    class WithoutMethods(EngineAdapter):
        def make(self, mix: RequestMix) -> None: ...

        def step(self) -> None: ...

    message = "WithoutMethods must define submit, tokens, is_finished, find_leaks, path_counts"
    with pytest.raises(TypeError, match=message):
        conformance(WithoutMethods)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("adapter", "message"),
    [(LosesTheLastToken, "request "), (ForksShareTheirDraws, "fork ")],  # run_mix and run_forks
)
def test_failing_mix_is_reported_once_and_replayed_until_fixed(
    engines: Project, adapter: type[EngineAdapter], message: str
) -> None:
    engines.write(test_it=file_testing(adapter))
    output = engines.pytest(*SHORT_SEARCH).stdout.str().partition("= FAILURES =")[2]
    (line,) = {line for line in output.splitlines() if line.startswith(message)}
    assert output.count(f"{line}\n\na cache of ") == 1
    for noise in ("Traceback", "Failing test case", "RequestMix(", "engines/run.py"):
        assert noise not in output
    trace, script = engines.failure_name(".json"), engines.failure_name(".py")
    name = f"{adapter.__module__}:{adapter.__qualname__}"
    replay_options = ["--roseinfer-replay", str(trace), "--roseinfer-target", name]
    assert f"replay with: pytest {' '.join(replay_options)}\n         or: python {script}" in output
    broken = engines.pytest(*replay_options)
    assert (broken.ret, broken.stdout.str().count(line)) == (pytest.ExitCode.TESTS_FAILED, 1)
    assert f"MixDivergence: {line}\n" in engines.run_script().stderr

    right = ToyForks if adapter.defines("fork") else ToyAdapter
    for file in (trace, script):
        old, new = (f"{each.__module__}:{each.__qualname__}" for each in (adapter, right))
        text = file.read_text().replace("broken_engines.py", "toy_engine.py")
        file.write_text(text.replace(old, new))
    trusted = engines.pytest("--roseinfer-replay", str(trace), "--roseinfer-replay-trust")
    assert trusted.ret == pytest.ExitCode.OK
    fixed = engines.run_script()
    assert (fixed.stdout, fixed.stderr) == ("it passed: nothing differed\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [LosesTheLastToken, ForksShareTheirDraws])
def test_kept_failure_of_an_engine_is_replayed_until_fixed(
    engines: Project, adapter: type[EngineAdapter]
) -> None:
    """A kept mix fails a run that draws hardly any other, until the engine is right."""
    engines.write(test_it=file_testing(adapter))
    found = engines.pytest(*SHORT_SEARCH, "--roseinfer-keep")
    (kept,) = (engines.path / "roseinfer-kept").glob("*.json")
    found.stdout.fnmatch_lines([f"*kept as roseinfer-kept/{kept.name}: every run replays it*"])
    one_mix = ("--roseinfer-examples=1", "--roseinfer-required-paths=off", "-k", "requests_get")
    again = engines.pytest(*one_mix)
    assert again.ret == pytest.ExitCode.TESTS_FAILED
    again.stdout.fnmatch_lines([f"*It is a kept failure: roseinfer-kept/{kept.name} replays*"])

    right = ToyForks if adapter.defines("fork") else ToyAdapter
    old, new = (f"{each.__module__}:{each.__qualname__}" for each in (adapter, right))
    text = kept.read_text().replace("broken_engines.py", "toy_engine.py").replace(old, new)
    assert f'"adapter": "{new}"' in text
    kept.write_text(text)
    engines.write(test_it=file_testing(right))
    assert engines.pytest(*one_mix).ret == pytest.ExitCode.OK


def test_invalid_path_is_named_with_its_remedy() -> None:
    adapter = type("Mine", (ToyAdapter,), {"paths": {"fast": "slow"}})
    with pytest.raises(TypeError, match=re.escape("Mine.paths['fast'] is 'slow'")):
        conformance(adapter)
