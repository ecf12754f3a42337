"""Marks of tests of other projects, which are skipped where these are not fetched."""

from __future__ import annotations

import pytest

from tests.others.fetch import sources


def needs(project: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a module whose tests import a project; it has its name as ``PROJECT``."""
    reason = f"{project} is not downloaded: python -m tests.others.fetch {project}"
    return [
        pytest.mark.skipif(not sources(project).exists(), reason=reason),
        pytest.mark.usefixtures("project_path"),
        # Warnings of torch and transformers when its parts are imported.
        pytest.mark.filterwarnings("ignore"),
    ]
