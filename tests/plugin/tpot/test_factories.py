"""A factory hands over the step to time; what it does wrong is said."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.plugin.tpot.timed_project import FEW_PROCESSES, against, engine
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.plugin.conftest import Project


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


def test_what_a_factory_raises_is_shown(timed: Project) -> None:
    timed.write(**{"before/engine": "def decode():\n    raise OSError('no weights')"})
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*before: Traceback*", "*OSError: no weights"])


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        ("(print, 4)", "*expected 'step' and 'tokens'*"),
        ("{'step': print, 'tokens': 0}", "*brings 0 tokens*"),
        ("{'step': print, 'tokens': 1, 'colour': 2}", "*'colour'*mean nothing*"),
    ],
)
def test_what_a_factory_must_return(timed: Project, offered: str, said: str) -> None:
    timed.write(engine=f"def decode(): return {offered}")
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])


def test_what_a_step_prints_is_no_answer(timed: Project) -> None:
    noisy = engine(1000).replace("taken.append", "print('{}'); taken.append")
    timed.write(engine=noisy)
    against(timed).assert_outcomes(passed=1)
