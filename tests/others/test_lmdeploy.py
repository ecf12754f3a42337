"""LMDeploy's engine: output that does not depend on the batch, and documented findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests.others import lmdeploy_engine
from tests.others.engine_search import verdicts_of
from tests.others.needs import needs

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

PROJECT = "lmdeploy"

pytestmark = needs(PROJECT)


def test_repaired_engine_conforms() -> None:
    verdicts = verdicts_of(lmdeploy_engine.RepairedLmdeployEngine, examples=60)
    assert verdicts[:2] == ["equal", "equal"]


@pytest.mark.parametrize(
    "finding",
    [lmdeploy_engine.KeepsStateOfPreempted, lmdeploy_engine.SavesStateUnderStaleStep],
)
def test_search_finds_the_documented_finding(finding: type[EngineAdapter]) -> None:
    with pytest.raises(MixDivergence, match=r"token \d+: \d+; alone it gets \d+"):
        verdicts_of(finding, examples=300)
