"""The gate on the work of a step, as a project that uses it sees it."""

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
from tests.gates.costs_project import gated as gated

if TYPE_CHECKING:
    from tests.project import Project


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
    section = page.partition("### Gate the work of a decode step\n")[2]
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
    section = page.partition("### Gate the bytes of a decode step\n")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    project.write(my_engine=BYTES, test_costs=example)
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    moved = [
        "test_costs.py::test_decode, decode: 512 bytes, 2.00 times the minimum of 256",
        "  weights: 64 bytes, 1.00 times the minimum of 64",
        "  keys and values: 128 bytes, 1.00 times the minimum of 128",
        "  all else: 320 bytes, 5.00 times the minimum of 64",
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
            "test_costs.py::test_decode, decode: 768 bytes, 3.00 times the minimum of 256",
        ]
    )


CACHE_ALONE = """
    from my_engine import Engine

    def test_decode(roseinfer_costs):
        engine = Engine(4)
        roseinfer_costs.check_bytes(
            "decode", lambda: engine.keys.copy_(engine.values), tokens=4, weights=[],
            cache=[engine.keys, engine.values], context_bytes=lambda: 64,
        )
"""


def test_bytes_of_a_cache_alone(project: Project) -> None:
    project.write(my_engine=BYTES, test_costs=CACHE_ALONE)
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["  weights: 0 bytes, against the minimum of 0"])


def test_steps_that_differ_are_told_what_before_is_for(project: Project) -> None:
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


OF_MODULES = "weights= must hold torch.nn.Module or torch.Tensor, and not"
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
    assert "pytest_roseinfer/gates" not in str(result.stdout)


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
    assert "### roseinfer: work of steps\n\n- 1 did no more than their baselines\n" in said
    assert "does more work" not in said
    change(gated, "range(4)", "range(5)")
    gated.pytest().assert_outcomes(failed=1)
    assert "steady does more work than its baseline" in summary.read_text()[len(said) :]


def test_as_much_work_passes_and_says_nothing_of_an_update(gated: Project) -> None:
    result = gated.pytest("--roseinfer-costs", FILE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 did no more than their baselines"])
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
            f"If that is intended, write the new baseline with {UPDATE}.",
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
            f"{UPDATE} writes these as the baselines",
        ]
    )


def test_fewer_of_what_must_not_drop_fails(gated: Project) -> None:
    change(gated, '["fast_path"] += 1', '["fast_path"] += 0')
    result = gated.pytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  counters of its own, fast_path: 0, baseline 1"])


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
    result.stdout.fnmatch_lines(["*keyed_by: no-such-library is not installed*"])
