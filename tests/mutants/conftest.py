"""Copy of the page of results, which tests write to."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.mutants.planted import RESULTS_PAGE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def page(tmp_path: Path) -> Path:
    copy = tmp_path / "mutants.md"
    shutil.copy(RESULTS_PAGE, copy)
    return copy
