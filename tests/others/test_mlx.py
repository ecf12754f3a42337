"""mlx-lm's caches and engines: conformance, and the findings of docs/findings."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests.others import mlx_variants
from tests.others.engine_search import verdicts_of
from tests.others.fetch import FOLDER
from tests.others.found_scripts import preamble_about, scripts_about
from tests.others.mlx_engine import MlxBatchEngine, MlxSerialEngine

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

SOURCES = FOLDER / "mlx-lm"
PROJECT = "mlx-lm 0.32.2"
SCRIPTS = scripts_about(PROJECT)
WRONG_TOKEN = r"request \d, token \d+: \d+; alone it gets \d+"

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not SOURCES.exists(), reason="mlx-lm is not downloaded: python -m tests.others.fetch mlx-lm"
    ),
]


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCES)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (MlxBatchEngine, r"request \d was refused: ValueError: Sequence \d has an empty prompt"),
        (MlxSerialEngine, WRONG_TOKEN),
        (mlx_variants.DraftsInAWindow, WRONG_TOKEN),
        (mlx_variants.KeepsChunks, WRONG_TOKEN),
        (mlx_variants.BatchesMamba, WRONG_TOKEN),
        (mlx_variants.BatchesMambaAndAttention, WRONG_TOKEN),
        (mlx_variants.BatchesTheDeltaRule, WRONG_TOKEN),
        (mlx_variants.BatchesSoftCaps, f"broadcast_shapes|{WRONG_TOKEN}"),
        (mlx_variants.SeesAWindowAndItself, WRONG_TOKEN),
        (mlx_variants.BoundsTheCache, WRONG_TOKEN),
    ],
)
def test_search_finds_the_defect(adapter: type[EngineAdapter], message: str) -> None:
    with pytest.raises(MixDivergence, match=message):
        verdicts_of(adapter, examples=40)


def test_engine_conforms_apart_from_known_findings() -> None:
    verdicts = verdicts_of(mlx_variants.RecomputesTheLastToken, examples=40)
    assert {*verdicts} == {"equal", "met"}


@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_documented_script_prints_its_output(script: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", preamble_about(PROJECT) + script],
        cwd=SOURCES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
