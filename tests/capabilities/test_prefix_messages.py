"""Messages about blocks with equal tokens after different prefixes."""

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
    KeysByBlockAndPosition,
    KeysByTheBlockAlone,
)
from tests.capabilities.caches.namespaced_caches import LeavesTheNamespaceOut

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch

SPEC = CacheSpec(block_size=2, num_blocks=4)
BRANCHING_TEXTS = ((0, 0), (0, 1))
DIFFERENT_PREFIXES = (
    "after prefixes that first differ at token 1, which is 2 in text 1 and 1 in text 0"
)
FIRST_WRITER = "; sequence 0 was the first to write it"


@pytest.mark.parametrize(
    ("cache", "steps", "texts", "message"),
    [
        (
            KeysByBlockAndPosition,
            (Prefill(0, 4), Prefill(1, 4)),
            BRANCHING_TEXTS,
            f"text 0, token 2; both have token id 1, {DIFFERENT_PREFIXES}{FIRST_WRITER}",
        ),
        (
            KeysByBlockAndPosition,
            (Prefill(0, 4), Prefill(1, 2)),
            BRANCHING_TEXTS,
            "found 4, and only 2 of them may be found now; "
            f"block 1 also has token ids [1, 1], from token 2 of text 0 on, {DIFFERENT_PREFIXES}"
            f"{FIRST_WRITER}",
        ),
        (
            KeysByTheBlockAlone,
            (Prefill(0, 4),),
            ((0, 0),),
            f"; both have token id 1, as tokens 2 and 0 of their texts{FIRST_WRITER}",
        ),
        (
            LeavesTheNamespaceOut,
            (Prefill(0, 2),),
            ((0, 0), (0, WHOLE, 1)),
            "found 2, and only 0 of them may be found now; block 0 also has token ids [1, 1], "
            f"from token 0 of text 0 on, in namespaces 1 and 0{FIRST_WRITER}",
        ),
        (
            DoesNotCompare,
            (Prefill(0, 4), Prefill(1, 4), Prefill(2, 4)),
            (*BRANCHING_TEXTS, (0, 2)),
            "match_prefix() of text 2, 4 tokens long, found 4, and only 2 of them may be found now",
        ),
    ],
)
def test_failure_names_the_block_of_another_prefix(
    cache: type[KVCacheAdapter],
    steps: tuple[Operation, ...],
    texts: tuple[Branch, ...],
    message: str,
) -> None:
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(SPEC, steps, texts=texts))
    assert failure.value.summary.endswith(message)


def test_explanation_needs_equal_token_ids_after_another_prefix() -> None:
    texts = Texts(BRANCHING_TEXTS)
    expected, same, other = text_token(1, 2), text_token(0, 2), text_token(1, 1)
    assert (
        explain_equal_token(texts, expected, same, {})
        == f"; both have token id 1, {DIFFERENT_PREFIXES}"
    )
    for other_token in (expected, other, token_of(0, 2)):
        assert not explain_equal_token(texts, expected, other_token, {})
    expected_block, stored = [expected, text_token(1, 3)], {7: [same, text_token(0, 3)]}
    assert (
        f"; block 7 also has token ids [1, 1], from token 2 of text 0 on, {DIFFERENT_PREFIXES}"
        == (explain_equal_block(texts, expected_block, stored, {}))
    )
    for tokens in (
        expected_block,
        [expected],
        [other, text_token(1, 2)],
        [token_of(0, 2), token_of(0, 3)],
        [],
    ):
        assert not explain_equal_block(texts, expected_block, {7: tokens}, {})
