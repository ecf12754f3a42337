"""docs/tutorials/engine.md with a real model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.real_models.real_model import smollm2_file
from tests.tutorials.printed import blocks
from tests.tutorials.test_tutorial_engine import ENGINE, TUTORIAL

if TYPE_CHECKING:
    from tests.project import Project

pytestmark = pytest.mark.xdist_group("gemma")


@pytest.mark.slow
def test_engine_of_the_tutorial_on_a_real_model(project: Project) -> None:
    smollm2_file()
    model, settings = blocks(TUTORIAL, "A real model", "python")
    toy = re.search(r"^END = 5.*?(?=\n\n\n@dataclass)", ENGINE, re.M | re.S)
    assert toy
    (vocabulary,) = re.findall(r"^    vocabulary = 16.*\n", ENGINE, re.M)
    project.write(test_my_engine=ENGINE.replace(toy[0], model).replace(vocabulary, settings))
    result = project.pytest("--roseinfer-examples=1")
    result.assert_outcomes(passed=1, skipped=2)
