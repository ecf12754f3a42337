"""How tokens become chunks: each by itself for a few, several together for many."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.server.generation import Generation


@pytest.mark.parametrize(
    ("texts", "token", "seconds"),
    [
        (1, 0.03, 0),
        (3, 0.03, 0),
        (100, 0.03, 0.05),
        (1000, 0.03, 0.1),
        (100, 0.001, 0.016),
        (100, 0.0, 0),
    ],
)
def test_more_texts_wait_longer_for_a_chunk_but_not_for_many_tokens(
    texts: int, token: float, seconds: float
) -> None:
    nothing: Any = None
    generation = Generation(nothing, nothing, [], 1, nothing, lambda: texts)
    generation._token_s = token
    assert generation._pause() == pytest.approx(seconds)
