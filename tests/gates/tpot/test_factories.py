"""A factory hands over the step to time; what it does wrong is said."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import FEW_PROCESSES, against, engine, marked
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.project import Project


def test_the_ten_lines_of_the_how_to(timed: Project) -> None:
    page = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_engine/speed.py.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line and line[0] != "#"]) <= 10
    speed, test = code.split("# test_speed.py\n")
    for folder in ("my_engine", "before/my_engine"):
        (timed.path / folder).mkdir()
        package = f"{folder}/__init__"
        timed.write(
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
    timed.write(
        test_speed="import pytest\npytestmark = pytest.mark.roseinfer_tpot(margin=0.9, "
        f"{FEW_PROCESSES})\n" + test
    )
    result = against(timed)
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


def test_the_how_to_finds_a_loop_over_a_long_context_which_no_count_does(timed: Project) -> None:
    page = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_engine/contexts.py.*?)```", page, re.DOTALL)
    contexts, test = code.split("# test_contexts.py\n")
    as_it_was = ENGINE.format(more="")
    for folder in ("my_engine", "before/my_engine"):
        (timed.path / folder).mkdir()
        timed.write(**{f"{folder}/contexts": contexts, f"{folder}/__init__": as_it_was})
    few = f"pytestmark = pytest.mark.roseinfer_tpot(margin=0.9, {FEW_PROCESSES})"
    timed.write(test_speed=test.replace("import pytest\n", f"import pytest\n{few}\n"))
    timed.write(test_work=WORK)
    timed.pytest("--roseinfer-update-costs").assert_outcomes(passed=1, skipped=2)
    loop = "for token in self.tokens: token + 1\n" + " " * 12
    timed.write(**{"my_engine/__init__": ENGINE.format(more=loop)})
    result = against(timed)
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_speed.py::test_decode[[]short] * SAME",
            "*test_speed.py::test_decode[[]long] * SLOWER",
            "1 did no more than their baselines",
        ]
    )


def test_what_a_factory_raises_is_shown(timed: Project) -> None:
    timed.write(**{"before/engine": "def decode():\n    raise OSError('no weights')"})
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*before: Traceback*", "*OSError: no weights"])


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        ("(print, 4)", "*expected 'step' and 'tokens'*"),
        ("{'step': print(), 'tokens': 4}", "*returned a step that is not a function: None*"),
        ("{'step': print, 'tokens': 0}", "*tokens is 0: a decode step*"),
        ("{'step': print, 'tokens': 1, 'colour': 2}", "*unknown keys*'colour'*"),
    ],
)
def test_what_a_factory_must_return(timed: Project, offered: str, said: str) -> None:
    timed.write(engine=f"def decode(): return {offered}")
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("engin:decode", "here: module 'engin' does not exist"),
        ("engine.fast:decode", "here: module 'engine.fast' does not exist"),
        ("engine", "check('engine'): expected 'module:function'"),
        ("engine:", "check('engine:'): expected 'module:function'"),
    ],
)
def test_a_step_that_is_misspelt_is_so_here(timed: Project, named: str, said: str) -> None:
    timed.write(test_speed=marked().replace("engine:decode", named))
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])
    assert "Traceback" not in result.stdout.str()


def test_a_module_that_lacks_another_is_not_replaced_by_the_one_here(timed: Project) -> None:
    timed.write(**{"before/engine": "import nowhere"})
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*before: Traceback*", "ModuleNotFoundError: *'nowhere'"])


def test_what_a_step_prints_is_no_answer(timed: Project) -> None:
    noisy = engine(1000).replace("taken.append", "print('{}'); taken.append")
    timed.write(engine=noisy)
    against(timed).assert_outcomes(passed=1)
