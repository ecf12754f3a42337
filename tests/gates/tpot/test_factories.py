"""Factories that return the step to time, and messages about wrong ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import FEW_PROCESSES, engine, run_against, speed_test
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.project import Project


@pytest.mark.slow
def test_timing_example_of_the_how_to_runs(timed_project: Project) -> None:
    page = (ROOT / "docs" / "how-to" / "decode-steps.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_engine/speed.py.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line and line[0] != "#"]) <= 10
    speed, test = code.split("# test_speed.py\n")
    for folder in ("my_engine", "before/my_engine"):
        (timed_project.path / folder).mkdir()
        package = f"{folder}/__init__"
        timed_project.write(
            **{
                f"{folder}/speed": speed,
                package: """
            class Engine:
                def __init__(self, batch_size):
                    self.batch_size = batch_size

                def step(self):
                    return sum(range(100 * self.batch_size))
        """,
            }
        )
    timed_project.write(
        test_speed="import pytest\npytestmark = pytest.mark.roseinfer_tpot(margin=0.9, "
        f"{FEW_PROCESSES})\n" + test
    )
    result = run_against(timed_project)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_speed.py::test_decode * SAME"])


ENGINE = """
    class Engine:
        def __init__(self, batch_size, context):
            self.tokens = [0] * context

        def step(self):
            {more}return sum(range(2000))
"""
WORK = """
    import pytest
    from my_engine import Engine

    @pytest.mark.roseinfer_costs(packages=["my_engine"])
    def test_work(roseinfer_costs):
        roseinfer_costs.check("long", Engine(4, 8192).step, tokens=4)
"""


@pytest.mark.slow
def test_context_example_of_the_how_to_finds_an_uncounted_loop(timed_project: Project) -> None:
    page = (ROOT / "docs" / "how-to" / "decode-steps.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_engine/contexts.py.*?)```", page, re.DOTALL)
    contexts, test = code.split("# test_contexts.py\n")
    old_engine = ENGINE.format(more="")
    for folder in ("my_engine", "before/my_engine"):
        (timed_project.path / folder).mkdir()
        timed_project.write(**{f"{folder}/contexts": contexts, f"{folder}/__init__": old_engine})
    few_processes = f"pytestmark = pytest.mark.roseinfer_tpot(margin=0.9, {FEW_PROCESSES})"
    timed_project.write(
        test_speed=test.replace("import pytest\n", f"import pytest\n{few_processes}\n")
    )
    timed_project.write(test_work=WORK)
    timed_project.pytest("--roseinfer-update-costs").assert_outcomes(passed=1, skipped=2)
    loop = "for token in self.tokens: token + 1\n" + " " * 12
    timed_project.write(**{"my_engine/__init__": ENGINE.format(more=loop)})
    result = run_against(timed_project)
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_speed.py::test_decode[[]short] * SAME",
            "*test_speed.py::test_decode[[]long] * SLOWER",
            "1 did no more than their baselines",
        ]
    )


def test_error_of_a_factory_is_shown(timed_project: Project) -> None:
    timed_project.write(**{"before/engine": "def decode():\n    raise OSError('no weights')"})
    result = run_against(timed_project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*before: Traceback*", "*OSError: no weights"])


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("return_value", "message"),
    [
        ("(print, 4)", "*expected 'step' and 'tokens'*"),
        ("{'step': print(), 'tokens': 4}", "*returned a step that is not a function: None*"),
        ("{'step': print, 'tokens': 0}", "*tokens is 0: a decode step*"),
        ("{'step': print, 'tokens': 1, 'colour': 2}", "*unknown keys*'colour'*"),
    ],
)
def test_invalid_return_value_of_a_factory_is_named(
    timed_project: Project, return_value: str, message: str
) -> None:
    timed_project.write(engine=f"def decode(): return {return_value}")
    result = run_against(timed_project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("engin:decode", "here: module 'engin' does not exist"),
        ("engine.fast:decode", "here: module 'engine.fast' does not exist"),
        ("engine", "check('engine'): expected 'module:function'"),
        ("engine:", "check('engine:'): expected 'module:function'"),
    ],
)
def test_misspelt_target_of_a_step_is_named(
    timed_project: Project, target: str, message: str
) -> None:
    timed_project.write(test_speed=speed_test().replace("engine:decode", target))
    result = run_against(timed_project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    assert "Traceback" not in result.stdout.str()


def test_failing_module_of_the_reference_is_not_replaced(timed_project: Project) -> None:
    timed_project.write(**{"before/engine": "import nowhere"})
    result = run_against(timed_project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*before: Traceback*", "ModuleNotFoundError: *'nowhere'"])


def test_output_of_a_step_does_not_disturb_the_protocol(timed_project: Project) -> None:
    printing_engine = engine(1000).replace("taken.append", "print('{}'); taken.append")
    timed_project.write(engine=printing_engine)
    run_against(timed_project).assert_outcomes(passed=1)
