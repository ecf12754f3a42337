"""The gate on the work of a step, as a project that uses it sees it."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Project

FILE = "roseinfer-costs.json"
UPDATE = "--roseinfer-update-costs"
ENGINE = """
    import torch

    def look_up(row):
        return row + 1

    class Engine:
        def __init__(self):
            self.tokens = torch.zeros(4)
            self.counts = {"rows_uploaded": 0, "fast_path": 0}

        def step(self):
            for row in range(4):
                look_up(row)
            self.tokens.add_(1)
            self.counts["rows_uploaded"] += 1
            self.counts["fast_path"] += 1
"""
TEST = """
    import pytest
    from my_engine import Engine

    @pytest.mark.roseinfer_costs(packages=["my_engine"], must_not_drop=["fast_path"])
    def test_decode(roseinfer_costs):
        engine = Engine()
        roseinfer_costs.check(
            "steady", engine.step, tokens=4, counters=lambda: engine.counts
        )
"""
PYTHON = f"python {sys.version_info.major}.{sys.version_info.minor}"
TORCH = "torch " + ".".join(metadata.version("torch").split(".")[:2])


@pytest.fixture
def gated(project: Project) -> Project:
    """A project with an engine, a gate, and a baseline."""
    project.write(my_engine=ENGINE, test_costs=TEST)
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"written: *{FILE}"])
    return project


def change(project: Project, old: str, new: str) -> None:
    file = project.path / "my_engine.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def costs(project: Project, file: str = FILE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project.path / file).read_text())
    return found


def test_the_file_says_what_a_step_does(gated: Project) -> None:
    assert costs(gated) == {
        "format": 1,
        "steps": {
            "test_costs.py::test_decode": {
                "steady": {
                    "cpu": {
                        "tokens": 4,
                        "any version": {"counters": {"fast_path": 1, "rows_uploaded": 1}},
                        PYTHON: {
                            "python_calls": {
                                "Tensor.add_": 1,
                                "my_engine.Engine.step": 1,
                                "my_engine.look_up": 4,
                            }
                        },
                        TORCH: {"operations": {"add_": 1}},
                    }
                }
            }
        },
    }


def test_the_example_of_the_how_to_is_one(project: Project) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to.md").read_text(encoding="utf-8")
    section = page.partition("**Gate the work of a decode step.**")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    engine = ENGINE.replace("__init__(self)", "__init__(self, batch_size)")
    project.write(my_engine=engine, test_costs=example)
    project.pytest(UPDATE).assert_outcomes(passed=1)
    project.pytest().assert_outcomes(passed=1)


BYTES = """
    import torch

    class Engine:
        def __init__(self, batch_size):
            self.model = torch.nn.Linear(4, 4, bias=False)
            self.keys, self.values = torch.zeros(2, 16, 4)
            self.batch_size, self.bytes_per_token, self.stored = batch_size, 2 * 4 * 4, 0

        def rewind(self):
            self.stored = 0

        @torch.inference_mode()
        def step(self):
            rows = self.model(torch.ones((self.batch_size, 4)))
            self.stored += self.batch_size
            self.keys[:self.stored] = rows
            self.values[:self.stored] = rows
"""


def test_more_bytes_fail_and_the_least_is_shown(project: Project) -> None:
    """The example of the how-to does as much as its page says."""
    page = (Path(__file__).parents[2] / "docs" / "how-to.md").read_text(encoding="utf-8")
    section = page.partition("**Gate the bytes of a decode step.**")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    project.write(my_engine=BYTES, test_costs=example)
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    moved = [
        "test_costs.py::test_decode, decode: 512 bytes, 2.00 times the least of 256",
        "  weights: 64 bytes, 1.00 times the least of 64",
        "  keys and values: 128 bytes, 1.00 times the least of 128",
        "  all else: 320 bytes, 5.00 times the least of 64",
    ]
    result.stdout.fnmatch_lines(moved)
    assert costs(project)["steps"]["test_costs.py::test_decode"]["decode"]["cpu"] == {
        "tokens": 4,
        "any version": {},
        PYTHON: {},
        TORCH: {
            "weights": {"linear": 64},
            "keys_and_values": {"copy_": 128},
            "activations": {"copy_": 128, "linear": 128, "ones": 64},
        },
    }
    change(project, "= rows", "= rows.clone()")
    result = project.pytest("-rN")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"decode does more work than its baseline in *{FILE}:",
            "  bytes of all else: 576 a step, 144 a token, baseline 320 a step, 80 a token",
            "      clone: 256, baseline 0",
            "test_costs.py::test_decode, decode: 768 bytes, 3.00 times the least of 256",
        ]
    )


OF_MODULES = "weights= must hold torch.Module or torch.Tensor, and not"
WRONG_BYTES = {
    "step=engine.step()": "step= must be a function, and is None",
    "step=lambda rows: engine.step()": "step= is called without arguments: *'rows'",
    "before=0": "before= must be a function, and is 0",
    "context_bytes=1000": "context_bytes= must be a function, and is 1000",
    "context_bytes=lambda: 0.5": "context_bytes= must return a whole number, and returned a float",
    "weights=engine": f"{OF_MODULES} Engine",
    "weights=engine.model.state_dict()": f"{OF_MODULES} str",
    "cache=engine": "cache= must hold torch.Tensor, and not Engine",
    "cache=[engine.keys, 'values']": "cache= must hold torch.Tensor, and not str",
}


@pytest.mark.parametrize("wrong", WRONG_BYTES)
def test_what_bytes_cannot_be_counted_of_is_said_in_a_sentence(
    project: Project, wrong: str
) -> None:
    arguments = {
        "step": "engine.step",
        "before": "engine.rewind",
        "weights": "engine.model",
        "cache": "[engine.keys]",
        "context_bytes": "lambda: 64",
    }
    name, _, value = wrong.partition("=")
    arguments[name] = value
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    project.write(
        my_engine=BYTES,
        test_costs=f"""
            from my_engine import Engine

            def test_decode(roseinfer_costs):
                engine = Engine(4)
                roseinfer_costs.check_bytes("decode", tokens=4, {given})
        """,
    )
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"decode: {WRONG_BYTES[wrong]}"])
    assert "gates/work" not in str(result.stdout)


def test_counters_are_a_function_too(gated: Project) -> None:
    gated.write(test_costs=TEST.replace("lambda: engine.counts", "engine.counts"))
    result = gated.pytest()
    result.stdout.fnmatch_lines(["*steady: counters= must be a function, and is {*"])


def test_a_workflow_shows_what_was_compared(
    gated: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = gated.path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    gated.pytest().assert_outcomes(passed=1)
    said = summary.read_text()
    assert "### roseinfer: work of steps\n\n- 1 did no more than their baselines say\n" in said
    assert "does more work" not in said
    change(gated, "range(4)", "range(5)")
    gated.pytest().assert_outcomes(failed=1)
    assert "steady does more work than its baseline" in summary.read_text()[len(said) :]


def test_as_much_work_passes_and_says_nothing_of_an_update(gated: Project) -> None:
    result = gated.pytest("--roseinfer-costs", FILE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 did no more than their baselines say"])
    result.stdout.no_fnmatch_line(f"*{UPDATE}*")


def test_more_work_fails_and_names_it(gated: Project) -> None:
    change(gated, "self.tokens.add_(1)", "self.tokens.add_(1); look_up(0); self.tokens.sum()")
    change(gated, '["rows_uploaded"] += 1', '["rows_uploaded"] += 4')
    result = gated.pytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"steady does more work than its baseline in *{FILE}:",
            "  Python calls: 8 a step, 2 a token, baseline 6 a step, 1.5 a token",
            "      *Tensor.sum: 1, baseline 0",
            "      *my_engine.look_up: 5, baseline 4",
            "  torch operations, sum: 1, baseline 0",
            "  device allocations, tensors: 1, baseline 0",
            "  counters of its own, rows_uploaded: 4, baseline 1",
            f"If that is meant, {UPDATE} makes it the baseline.",
        ]
    )
    assert "measure_work" not in str(result.stdout), "the way to it leads through the plugin"
    gated.pytest(UPDATE).assert_outcomes(passed=1)
    gated.pytest().assert_outcomes(passed=1)


def test_less_work_passes_and_asks_for_an_update(gated: Project) -> None:
    change(gated, "range(4)", "range(2)")
    result = gated.pytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "test_costs.py::test_decode, steady does less:",
            "  less: Python calls: 4 a step, 1 a token, baseline 6 a step, 1.5 a token",
            f"{UPDATE} makes these their baselines",
        ]
    )


def test_fewer_of_what_must_not_drop_fails(gated: Project) -> None:
    change(gated, '["fast_path"] += 1', '["fast_path"] += 0')
    result = gated.pytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  counters of its own, fast_path: 0, baseline 1"])


def entry(project: Project) -> tuple[dict[str, Any], dict[str, Any]]:
    found = costs(project)
    return found, found["steps"]["test_costs.py::test_decode"]["steady"]["cpu"]


def write(project: Project, found: Any) -> None:
    (project.path / FILE).write_text(found if isinstance(found, str) else json.dumps(found))


def test_a_baseline_that_is_not_there_fails(gated: Project) -> None:
    found, recorded = entry(gated)
    recorded["torch 1.0"] = recorded.pop(TORCH)
    write(gated, found)
    shown = gated.pytest().stdout
    shown.fnmatch_lines(
        [f"*no baseline for 'steady' of * with {TORCH} in *{FILE}, which has torch 1.0: {UPDATE} *"]
    )
    shown.no_fnmatch_line("*another exception occurred*")
    recorded["tokens"] = 3
    recorded[TORCH] = recorded["torch 1.0"]
    write(gated, found)
    gated.pytest().stdout.fnmatch_lines(["*brings 4 tokens, and its baseline is of 3: *"])
    (gated.path / FILE).unlink()
    result = gated.pytest()
    result.assert_outcomes(failed=1)
    lost = (
        f"*no baseline for 'steady' of * on cpu since *{FILE} is not there: {UPDATE} records one*"
    )
    result.stdout.fnmatch_lines([lost])
    result = gated.pytest("--roseinfer-costs", "misspelt.json")
    result.stdout.fnmatch_lines(["*no baseline for * since *misspelt.json is not there: *"])


def test_a_baseline_of_another_device_is_named(gated: Project) -> None:
    found, recorded = entry(gated)
    found["steps"]["test_costs.py::test_decode"]["steady"] = {"cuda": recorded}
    write(gated, found)
    result = gated.pytest()
    result.assert_outcomes(failed=1)
    said = f"*no baseline for 'steady' of * on cpu in *{FILE}, which has one on cuda: {UPDATE} *"
    result.stdout.fnmatch_lines([said])
    found["steps"]["test_costs.py::test_decode"] = {}
    write(gated, found)
    gated.pytest().stdout.fnmatch_lines(
        [f"*no baseline for * on cpu in *{FILE}: {UPDATE} records*"]
    )


BROKEN = {
    "{": " cannot be read: ",
    '{"format": 9}': " is not of format 1. ",
    '{"format": 1, "steps": {"test": 3}}': ": steps.test must be an object. ",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_fails_the_test_and_is_not_written_over(gated: Project, text: str) -> None:
    write(gated, text)
    for options in ((), (UPDATE,)):
        result = gated.pytest(*options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"*steady: *{FILE}{BROKEN[text]}*Restore it from git, or *"])
    assert (gated.path / FILE).read_text() == text


def test_a_counter_that_must_not_drop_is_one_when_its_baseline_is_written(gated: Project) -> None:
    written = (gated.path / FILE).read_text()
    for counters in ("must_not_drop=['fastpath']", "must_not_drop=['fast_path', 'fastpath']"):
        gated.write(test_costs=TEST.replace('must_not_drop=["fast_path"]', counters))
        for options in ((), (UPDATE,)):
            result = gated.pytest(*options)
            result.assert_outcomes(failed=1)
            result.stdout.fnmatch_lines(
                [
                    "*must_not_drop names no counter of the step: fastpath. counters= returned "
                    "fast_path, rows_uploaded*"
                ]
            )
    assert (gated.path / FILE).read_text() == written


def test_a_step_that_does_nothing_gets_no_baseline(project: Project) -> None:
    test = TEST.replace("engine.step", "lambda: None").replace(
        ", counters=lambda: engine.counts", ""
    )
    test = test.replace('(packages=["my_engine"], must_not_drop=["fast_path"])', "")
    project.write(my_engine=ENGINE, test_costs=test)
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*steady: the step was called, and did nothing else that is *"])


def test_an_update_leaves_other_versions_tests_and_devices_as_they_are(gated: Project) -> None:
    found, recorded = entry(gated)
    recorded["python 2.7"] = {"python_calls": {"reduce": 1}}
    found["steps"]["test_other.py::test"] = {"steady": {"cuda": {"tokens": 1}}}
    write(gated, found)
    change(gated, "range(4)", "range(2)")
    gated.pytest(UPDATE).assert_outcomes(passed=1)
    recorded[PYTHON]["python_calls"]["my_engine.look_up"] = 2
    assert costs(gated) == found


def said_of_left_behind(result: pytest.RunResult) -> list[str]:
    lines = [line for line in result.outlines if "that nothing checks" in line]
    return [line.partition("that nothing checks: ")[2] for line in lines]


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_an_update_names_what_was_renamed(gated: Project, workers: tuple[str, ...]) -> None:
    """A test, a file of tests, or a step; what is not in this run is left alone."""
    gated.write(test_gone=TEST, test_costs=TEST + TEST.replace("_decode", "_again"))
    gated.pytest(UPDATE).assert_outcomes(passed=3)
    (gated.path / "test_gone.py").unlink()
    gated.write(test_costs=TEST.replace("_decode", "_decoding"), test_more=TEST)
    old = ("test_costs.py::test_again", "test_costs.py::test_decode")
    gone = "test_gone.py::test_decode"
    some = gated.pytest(UPDATE, *workers, "test_costs.py::test_decoding")
    assert said_of_left_behind(some) == [f"{gone}. Delete them there"]
    result = gated.pytest(UPDATE, *workers, "-k", "test_decoding or test_more")
    result.assert_outcomes(passed=2)
    assert said_of_left_behind(result) == [f"{'; '.join([*old, gone])}. Delete them there"]
    found = costs(gated)
    for name in (*old, gone):
        del found["steps"][name]
    write(gated, found)
    assert said_of_left_behind(gated.pytest(UPDATE, *workers, "-k", "more")) == []
    gated.write(test_more=TEST.replace("steady", "decode"))
    result = gated.pytest(UPDATE, *workers)
    assert said_of_left_behind(result) == ["test_more.py::test_decode, steady. Delete them there"]


def test_what_a_conftest_leaves_out_is_not_renamed(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TEST + TEST.replace("_decode", "_again"))
    project.pytest(UPDATE).assert_outcomes(passed=2)
    project.write(conftest="def pytest_collection_modifyitems(items): del items[-1]")
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    assert said_of_left_behind(result) == []


def test_what_only_the_last_failures_leave_out_is_not_renamed(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TEST + TEST.replace("_decode", "_again"))
    project.pytest(UPDATE).assert_outcomes(passed=2)
    failing = TEST.replace("_decode", "_again").replace("tokens=4", "tokens=0")
    project.write(test_costs=TEST + failing)
    project.pytest("-p", "cacheprovider").assert_outcomes(passed=1, failed=1)
    project.write(test_costs=TEST + TEST.replace("_decode", "_again"))
    result = project.pytest(UPDATE, "-p", "cacheprovider", "--lf")
    result.assert_outcomes(passed=1)
    assert said_of_left_behind(result) == []


TWO = """
    import pytest
    from my_engine import Engine

    @pytest.mark.parametrize("name", "abcdef")
    def test_decode(roseinfer_costs, name):
        roseinfer_costs.check(name, Engine().step, tokens=4)
"""


def test_workers_of_xdist_compare_and_lose_no_update(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TWO)
    project.pytest(UPDATE, "-n", "2").assert_outcomes(passed=6)
    assert len(costs(project)["steps"]) == 6
    result = project.pytest("--roseinfer-costs", FILE, "-n", "2")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["6 did no more than their baselines say"])


def test_a_file_of_another_name_and_place(project: Project) -> None:
    project.ini("roseinfer_costs = kept/by-ini.json")
    project.write(my_engine=ENGINE, test_costs=TEST)
    project.pytest(UPDATE).assert_outcomes(passed=1)
    assert list(costs(project, "kept/by-ini.json")["steps"]) == ["../test_costs.py::test_decode"]
    project.pytest(UPDATE, "--roseinfer-costs", "asked.json").assert_outcomes(passed=1)
    assert list(costs(project, "asked.json")["steps"]) == ["test_costs.py::test_decode"]
    assert not (project.path / FILE).exists()


NOTHING_COMPARED = {
    ("--roseinfer-costs", FILE): "--roseinfer-costs: no test of this run compared a step *",
    (UPDATE,): f"{UPDATE}: no test of this run measured a step",
}


@pytest.mark.parametrize("asked", NOTHING_COMPARED)
def test_a_run_asked_for_the_gate_that_compares_nothing_fails(
    project: Project, asked: tuple[str, ...]
) -> None:
    project.write(test_plain="def test_plain(): pass")
    for workers in ((), ("-n", "1")):
        result = project.pytest(*asked, *workers)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines([f"FAILED: {NOTHING_COMPARED[asked]}"])


def test_collecting_compares_nothing_and_need_not(gated: Project) -> None:
    assert gated.pytest("--collect-only", "--roseinfer-costs", FILE).ret == pytest.ExitCode.OK


def test_a_test_that_checks_no_step_fails(project: Project) -> None:
    project.write(
        test_costs="""
            import pytest

            def test_nothing(roseinfer_costs):
                pass

            def test_skipped(roseinfer_costs):
                pytest.skip("not here")

            def test_twice(roseinfer_costs):
                roseinfer_costs.checked.add("steady")
                with pytest.raises(ValueError, match="'steady' already"):
                    roseinfer_costs.check("steady", print, tokens=1)

            def test_no_token(roseinfer_costs):
                with pytest.raises(ValueError, match="brings 0 tokens"):
                    roseinfer_costs.check("none", print, tokens=0)
                pytest.skip("it checked none")
        """
    )
    result = project.pytest()
    result.assert_outcomes(failed=1, skipped=2, passed=1)
    result.stdout.fnmatch_lines(["the test took roseinfer_costs and checked no step with it"])


MISTAKES = {
    "package=['mine']": "does not take package, only packages=[[]...], keyed_by=[[]...] and *",
    "'mine'": "does not take 'mine', only *",
    "packages='mine'": "has packages='mine': expected a list of names",
    "keyed_by=[3]": "has keyed_by=[[]3]: expected a list of names",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_an_argument_the_marker_does_not_have_is_a_usage_error(
    project: Project, arguments: str
) -> None:
    marked = f"@pytest.mark.roseinfer_costs({arguments})"
    project.write(test_costs=f"import pytest\n{marked}\ndef test(roseinfer_costs): pass")
    result = project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = MISTAKES[arguments]
    result.stderr.fnmatch_lines([f"ERROR: test_costs.py::test: the marker roseinfer_costs {said}"])


def test_a_marked_test_without_the_fixture_is_a_usage_error(project: Project) -> None:
    project.write(test_costs="import pytest\n@pytest.mark.roseinfer_costs\ndef test(): pass")
    result = project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: test_costs.py::test: marked roseinfer_costs, *"])


def test_a_library_that_is_not_installed_cannot_be_a_key(project: Project) -> None:
    test = TEST.replace("packages=", "keyed_by=['no-such-library'], packages=")
    project.write(my_engine=ENGINE, test_costs=test)
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*keyed_by names no-such-library, which is not installed*"])
