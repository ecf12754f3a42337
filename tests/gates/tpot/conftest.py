"""A project with a step to time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import engine, marked, there

if TYPE_CHECKING:
    from tests.project import Project


@pytest.fixture
def timed(project: Project) -> Project:
    """A project whose step takes 1000 us, and the same in a folder beside it."""
    project.write(engine=engine(1000), test_speed=marked())
    there(project, 1000)
    return project
