"""The gate on the work of a step in a user's project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gates.costs_project import (
    ENGINE,
    FILE,
    PYTHON,
    TEST,
    TORCH,
    UPDATE,
    change,
    costs,
)
from tests.gates.costs_project import gated_project as gated_project

if TYPE_CHECKING:
    from tests.project import Project

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "decode-steps.md"


def test_baseline_file_lists_the_work_of_a_step(gated_project: Project) -> None:
    assert costs(gated_project) == {
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


def test_work_example_of_the_how_to_runs(project: Project) -> None:
    page = HOW_TO.read_text(encoding="utf-8")
    section = page.partition("## Gate the work\n")[2]
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


def test_more_bytes_fail_and_the_minimum_is_shown(project: Project) -> None:
    """The how-to's example moves as many bytes as its page says."""
    page = HOW_TO.read_text(encoding="utf-8")
    section = page.partition("## Gate the bytes\n")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    project.write(my_engine=BYTES, test_costs=example)
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    report_lines = [
        "test_costs.py::test_decode, decode: 512 bytes, 2.00 times the minimum of 256",
        "  weights: 64 bytes, 1.00 times the minimum of 64",
        "  keys and values: 128 bytes, 1.00 times the minimum of 128",
        "  all else: 320 bytes, 5.00 times the minimum of 64",
    ]
    result.stdout.fnmatch_lines(report_lines)
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
            "test_costs.py::test_decode, decode: 768 bytes, 3.00 times the minimum of 256",
        ]
    )


TEST_OF_A_CACHE = """
    from my_engine import Engine

    def test_decode(roseinfer_costs):
        engine = Engine(4)
        roseinfer_costs.check_bytes(
            "decode", lambda: engine.keys.copy_(engine.values), tokens=4, weights=[],
            cache=[engine.keys, engine.values], context_bytes=lambda: 64,
        )
"""


def test_bytes_of_a_cache_without_weights_are_counted(project: Project) -> None:
    project.write(my_engine=BYTES, test_costs=TEST_OF_A_CACHE)
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["  weights: 0 bytes, against the minimum of 0"])


def test_unequal_steps_suggest_the_argument_before(project: Project) -> None:
    differing = """
        from itertools import count
        import torch

        def test_decode(roseinfer_costs):
            steps, rows = count(1), torch.zeros(4)
            step = lambda: [rows.add_(1) for _ in range(next(steps))]
            roseinfer_costs.check("decode", step, tokens=4)
    """
    project.write(test_costs=differing)
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*before= must restore the same contexts for each step"])


WEIGHTS_RULE = "weights= must hold torch.nn.Module or torch.Tensor, and not"
WRONG_BYTES = {
    "step=engine.step()": "step= must be a function, and is None",
    "step=lambda rows: engine.step()": "step= is called without arguments: *'rows'",
    "before=0": "before= must be a function, and is 0",
    "context_bytes=1000": "context_bytes= must be a function, and is 1000",
    "context_bytes=lambda: 0.5": "context_bytes= must return a whole number, and returned a float",
    "weights=engine": f"{WEIGHTS_RULE} Engine",
    "weights=engine.model.state_dict()": f"{WEIGHTS_RULE} str",
    "cache=engine": "cache= must hold torch.Tensor, and not Engine",
    "cache=[engine.keys, 'values']": "cache= must hold torch.Tensor, and not str",
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("wrong_argument", WRONG_BYTES)
def test_invalid_argument_of_check_bytes_is_one_sentence(
    project: Project, wrong_argument: str
) -> None:
    arguments = {
        "step": "engine.step",
        "before": "engine.rewind",
        "weights": "engine.model",
        "cache": "[engine.keys]",
        "context_bytes": "lambda: 64",
    }
    name, _, value = wrong_argument.partition("=")
    arguments[name] = value
    call_arguments = ", ".join(f"{name}={value}" for name, value in arguments.items())
    project.write(
        my_engine=BYTES,
        test_costs=f"""
            from my_engine import Engine

            def test_decode(roseinfer_costs):
                engine = Engine(4)
                roseinfer_costs.check_bytes("decode", tokens=4, {call_arguments})
        """,
    )
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"decode: {WRONG_BYTES[wrong_argument]}"])
    assert "pytest_roseinfer/gates" not in str(result.stdout)


def test_counters_must_be_a_function(gated_project: Project) -> None:
    gated_project.write(test_costs=TEST.replace("lambda: engine.counts", "engine.counts"))
    result = gated_project.pytest()
    result.stdout.fnmatch_lines(["*steady: counters= must be a function, and is {*"])


def test_workflow_summary_shows_the_comparison(
    gated_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = gated_project.path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    gated_project.pytest().assert_outcomes(passed=1)
    message = summary.read_text()
    assert "### roseinfer: work of steps\n\n- 1 did no more than their baselines\n" in message
    assert "does more work" not in message
    change(gated_project, "range(4)", "range(5)")
    gated_project.pytest().assert_outcomes(failed=1)
    assert "steady does more work than its baseline" in summary.read_text()[len(message) :]


def test_equal_work_passes_without_suggesting_an_update(gated_project: Project) -> None:
    result = gated_project.pytest("--roseinfer-costs", FILE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 did no more than their baselines"])
    result.stdout.no_fnmatch_line(f"*{UPDATE}*")


def test_more_work_fails_and_is_named(gated_project: Project) -> None:
    change(
        gated_project, "self.tokens.add_(1)", "self.tokens.add_(1); look_up(0); self.tokens.sum()"
    )
    change(gated_project, '["rows_uploaded"] += 1', '["rows_uploaded"] += 4')
    result = gated_project.pytest()
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
            f"If that is intended, write the new baseline with {UPDATE}.",
        ]
    )
    assert "measure_work" not in str(result.stdout), "expected no traceback of the plugin"
    gated_project.pytest(UPDATE).assert_outcomes(passed=1)
    gated_project.pytest().assert_outcomes(passed=1)


def test_less_work_passes_and_suggests_an_update(gated_project: Project) -> None:
    change(gated_project, "range(4)", "range(2)")
    result = gated_project.pytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "test_costs.py::test_decode, steady does less:",
            "  less: Python calls: 4 a step, 1 a token, baseline 6 a step, 1.5 a token",
            f"{UPDATE} writes these as the baselines",
        ]
    )


def test_drop_of_a_protected_counter_fails(gated_project: Project) -> None:
    change(gated_project, '["fast_path"] += 1', '["fast_path"] += 0')
    result = gated_project.pytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  counters of its own, fast_path: 0, baseline 1"])


NOTHING_COMPARED = {
    ("--roseinfer-costs", FILE): "--roseinfer-costs: no test of this run compared a step *",
    (UPDATE,): f"{UPDATE}: no test of this run measured a step",
}


@pytest.mark.slow
@pytest.mark.parametrize("options", NOTHING_COMPARED)
def test_run_with_the_gate_that_compares_nothing_fails(
    project: Project, options: tuple[str, ...]
) -> None:
    project.write(test_plain="def test_plain(): pass")
    for workers in ((), ("-n", "1")):
        result = project.pytest(*options, *workers)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines([f"FAILED: {NOTHING_COMPARED[options]}"])


def test_collection_without_comparison_passes(gated_project: Project) -> None:
    assert (
        gated_project.pytest("--collect-only", "--roseinfer-costs", FILE).ret == pytest.ExitCode.OK
    )


def test_test_that_checks_no_step_fails(project: Project) -> None:
    project.write(
        test_costs="""
            import pytest

            def test_nothing(roseinfer_costs):
                pass

            def test_skipped(roseinfer_costs):
                pytest.skip("not here")

            def test_twice(roseinfer_costs):
                roseinfer_costs.checked.add("steady")
                with pytest.raises(ValueError, match="already checked a step named 'steady'"):
                    roseinfer_costs.check("steady", print, tokens=1)

            def test_no_token(roseinfer_costs):
                with pytest.raises(ValueError, match="tokens=0: a decode step"):
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


@pytest.mark.sampled_cases
@pytest.mark.parametrize("arguments", MISTAKES)
def test_invalid_argument_of_the_marker_is_a_usage_error(project: Project, arguments: str) -> None:
    marker = f"@pytest.mark.roseinfer_costs({arguments})"
    project.write(test_costs=f"import pytest\n{marker}\ndef test(roseinfer_costs): pass")
    result = project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = MISTAKES[arguments]
    result.stderr.fnmatch_lines(
        [f"ERROR: test_costs.py::test: the marker roseinfer_costs {message}"]
    )


def test_marked_test_without_the_fixture_is_a_usage_error(project: Project) -> None:
    project.write(test_costs="import pytest\n@pytest.mark.roseinfer_costs\ndef test(): pass")
    result = project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: test_costs.py::test: marked roseinfer_costs, *"])


def test_missing_library_in_keyed_by_fails(project: Project) -> None:
    test = TEST.replace("packages=", "keyed_by=['no-such-library'], packages=")
    project.write(my_engine=ENGINE, test_costs=test)
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*keyed_by: no-such-library is not installed*"])
