"""tokasaurus' manager: output that does not depend on the batch, and documented findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests.others import tokasaurus_engine
from tests.others.engine_search import verdicts_of
from tests.others.needs import needs

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

PROJECT = "tokasaurus"

pytestmark = needs(PROJECT)


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
