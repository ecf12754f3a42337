"""Bugs planted into caches of fetched projects are found, as their pages say."""

from __future__ import annotations

import pytest

from tests.others.fetch import sources
from tests.others.planted_bugs import BUGS, search

HARMLESS = {"a block of an equal hash is matched", "a leaf that gains a child stays a leaf"}
"""Bugs that change no result: other code of the project checks the same."""
RARE = {"the newest leaf is evicted", "a block that is not full is stored"}
"""Bugs that need more mixes than a test runs."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("project", "name"),
    [(project, name) for project in BUGS for name in BUGS[project] if name not in HARMLESS | RARE],
)
def test_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, project: str, name: str) -> None:
    folder = sources(project)
    if not folder.exists():
        pytest.skip(f"{project} is not fetched: python -m tests.others.fetch {project}")
    monkeypatch.syspath_prepend(folder)
    assert search(project, BUGS[project][name], examples=200)
