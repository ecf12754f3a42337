"""Fixtures for projects whose steps are timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import engine, speed_test, write_reference

if TYPE_CHECKING:
    from tests.project import Project


@pytest.fixture
def timed_project(project: Project) -> Project:
    """Return a project with a step of 1000 us, and an equal one in the folder ``before``."""
    project.write(engine=engine(1000), test_speed=speed_test())
    write_reference(project, 1000)
    return project
