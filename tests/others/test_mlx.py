"""mlx-lm's caches and engines: conformance, and the findings of docs/findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests.others import mlx_variants
from tests.others.engine_search import verdicts_of
from tests.others.mlx_engine import MlxBatchEngine, MlxSerialEngine
from tests.others.needs import needs

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

PROJECT = "mlx-lm"
WRONG_TOKEN = r"request \d, token \d+: \d+; alone it gets \d+"

pytestmark = needs(PROJECT)


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
