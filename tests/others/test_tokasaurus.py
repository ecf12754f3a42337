"""tokasaurus' manager: output that does not depend on the batch, and documented findings."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests.others import tokasaurus_engine
from tests.others.engine_search import verdicts_of
from tests.others.fetch import sources
from tests.others.found_scripts import preamble_about, scripts_about

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

SOURCES = sources("tokasaurus")
PROJECT = "tokasaurus 0.0.4"
SCRIPTS = scripts_about(PROJECT)

pytestmark = [
    pytest.mark.skipif(
        not SOURCES.exists(),
        reason="tokasaurus is not downloaded: python -m tests.others.fetch tokasaurus",
    ),
    # Warnings of torch and transformers when its parts are imported.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCES)


def test_repaired_engine_conforms() -> None:
    verdicts = verdicts_of(tokasaurus_engine.RepairedTokasaurusEngine, examples=60)
    assert verdicts[:1] == ["equal"]


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        (tokasaurus_engine.CompletesOneToken, "a step raised AssertionError"),
    ],
)
def test_search_finds_the_documented_finding(finding: type[EngineAdapter], message: str) -> None:
    with pytest.raises(MixDivergence, match=message):
        verdicts_of(finding, examples=300)


@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_documented_script_prints_its_output(script: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", preamble_about(PROJECT) + script],
        cwd=SOURCES,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == printed, done.stderr
