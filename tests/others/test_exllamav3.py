"""exllamav3's generator: output that does not depend on the batch, and documented findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests.others import exllamav3_engine
from tests.others.engine_search import verdicts_of
from tests.others.needs import needs

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

PROJECT = "exllamav3"

pytestmark = needs(PROJECT)


def test_repaired_engine_conforms() -> None:
    verdicts = verdicts_of(exllamav3_engine.RepairedExllamav3Engine, examples=60)
    assert verdicts[:1] == ["equal"]


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        (exllamav3_engine.ChecksPages, "Page table validation failed"),
    ],
)
def test_search_finds_the_documented_finding(finding: type[EngineAdapter], message: str) -> None:
    with pytest.raises(MixDivergence, match=message):
        verdicts_of(finding, examples=300)
