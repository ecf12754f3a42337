"""Blocks that say the same behind different beginnings are told as that, where one is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, run_history
from pytest_roseinfer.capabilities.writes import Prefill
from pytest_roseinfer.oracle.pages import text_token, token_of
from pytest_roseinfer.oracle.texts import (
    WHOLE,
    Texts,
    explain_equal_block,
    explain_equal_token,
)
from tests.capabilities.caches.broken_text_caches import (
    DoesNotCompare,
    KnowsTheBlockAlone,
    KnowsTheBlockAtItsPlace,
)
from tests.capabilities.caches.namespaced_caches import LeavesTheNamespaceOut

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch

SPEC = CacheSpec(block_size=2, num_blocks=4)
PARTING = ((0, 0), (0, 1))
APART = "after prefixes that first differ at token 1, which is 2 in text 1 and 1 in text 0"
BY_0 = "; sequence 0 was the first to write it"


@pytest.mark.parametrize(
    ("cache", "steps", "texts", "said"),
    [
        (
            KnowsTheBlockAtItsPlace,
            (Prefill(0, 4), Prefill(1, 4)),
            PARTING,
            f"text 0, token 2; both have token id 1, {APART}{BY_0}",
        ),
        (
            KnowsTheBlockAtItsPlace,
            (Prefill(0, 4), Prefill(1, 2)),
            PARTING,
            "found 4, and only 2 of them may be found now; "
            f"block 1 also has token ids [1, 1], from token 2 of text 0 on, {APART}{BY_0}",
        ),
        (
            KnowsTheBlockAlone,
            (Prefill(0, 4),),
            ((0, 0),),
            f"; both have token id 1, as tokens 2 and 0 of their texts{BY_0}",
        ),
        (
            LeavesTheNamespaceOut,
            (Prefill(0, 2),),
            ((0, 0), (0, WHOLE, 1)),
            "found 2, and only 0 of them may be found now; block 0 also has token ids [1, 1], "
            f"from token 0 of text 0 on, in namespaces 1 and 0{BY_0}",
        ),
        (
            DoesNotCompare,
            (Prefill(0, 4), Prefill(1, 4), Prefill(2, 4)),
            (*PARTING, (0, 2)),
            "match_prefix() of text 2, 4 tokens long, found 4, and only 2 of them may be found now",
        ),
    ],
)
def test_a_block_of_another_beginning_is_told_as_that(
    cache: type[KVCacheAdapter],
    steps: tuple[Operation, ...],
    texts: tuple[Branch, ...],
    said: str,
) -> None:
    with pytest.raises(Divergence) as found:
        run_history(cache, History(SPEC, steps, texts=texts))
    assert found.value.what.endswith(said)


def test_what_says_something_else_or_stands_in_its_place_is_not_told_so() -> None:
    texts = Texts(PARTING)
    want, same, other = text_token(1, 2), text_token(0, 2), text_token(1, 1)
    assert explain_equal_token(texts, want, same, {}) == f"; both have token id 1, {APART}"
    for found in (want, other, token_of(0, 2)):
        assert not explain_equal_token(texts, want, found, {})
    wanted, stored = [want, text_token(1, 3)], {7: [same, text_token(0, 3)]}
    assert f"; block 7 also has token ids [1, 1], from token 2 of text 0 on, {APART}" == (
        explain_equal_block(texts, wanted, stored, {})
    )
    for held in (wanted, [want], [other, text_token(1, 2)], [token_of(0, 2), token_of(0, 3)], []):
        assert not explain_equal_block(texts, wanted, {7: held}, {})
