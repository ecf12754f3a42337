"""mini-sglang's engine: output that does not depend on the batch, and documented findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import MixDivergence
from tests.others import mini_sglang
from tests.others.engine_search import verdicts_of
from tests.others.needs import needs

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

PROJECT = "mini-sglang"

pytestmark = needs(PROJECT)


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
