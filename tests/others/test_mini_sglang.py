"""mini-sglang's engine: output that does not depend on the batch, and documented findings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests import warm_process
from tests.others import mini_sglang
from tests.others.engine_search import verdicts_of
from tests.others.fetch import sources
from tests.others.found_scripts import preamble_about, scripts_about

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

SOURCES = sources("mini-sglang")
PROJECT = "mini-sglang at 20fcd7f"
SCRIPTS = scripts_about(PROJECT)

pytestmark = [
    pytest.mark.skipif(
        not SOURCES.exists(),
        reason="mini-sglang is not downloaded: python -m tests.others.fetch mini-sglang",
    ),
    # Warnings of torch and transformers when its parts are imported.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCES)


def test_repaired_engine_conforms() -> None:
    verdicts = verdicts_of(mini_sglang.RepairedMiniSglangEngine, examples=60)
    assert verdicts[:2] == ["equal", "equal"]


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        (mini_sglang.AdmitsByTokens, r"a step raised AssertionError: Cannot evict"),
        (mini_sglang.ReadsFreedPages, r"token \d+: \d+; alone it gets \d+"),
        (mini_sglang.ReusesRows, r"token \d+: \d+; alone it gets \d+"),
        (mini_sglang.CancelsInFlight, r"the engine still holds \d+ locked tokens"),
        (mini_sglang.EndsEarly, r"ended after \d+ tokens; alone it gets \d+"),
        (mini_sglang.OfflineMiniSglangEngine, r"had ended and got token"),
    ],
)
def test_search_finds_the_documented_finding(finding: type[EngineAdapter], message: str) -> None:
    with pytest.raises(MixDivergence, match=message):
        verdicts_of(finding, examples=300)


@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_documented_script_prints_its_output(script: str, printed: str) -> None:
    command = ["-c", preamble_about(PROJECT) + script]
    done = warm_process.run(command, cwd=SOURCES, environment=os.environ, timeout=120)
    assert done.stdout == printed, done.stderr
