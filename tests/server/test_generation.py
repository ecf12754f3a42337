"""How tokens become chunks: each by itself for a few, several together for many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from roseinfer.server.generation import Generation


@pytest.mark.parametrize(
    ("apart", "texts", "token", "seconds"),
    [
        (False, 1, 0.03, 0),
        (False, 3, 0.03, 0),
        (False, 100, 0.03, 0.05),
        (False, 1000, 0.03, 0.1),
        (False, 100, 0.001, 0.016),
        (False, 100, 0.0, 0),
        (True, 15, 0.03, 0),
        (True, 100, 0.03, 0.0125),
        (True, 1000, 0.03, 0.1),
        (True, 100, 0.0005, 0.008),
    ],
)
def test_more_texts_wait_longer_for_a_chunk_but_not_for_many_tokens(
    apart: bool, texts: int, token: float, seconds: float
) -> None:
    nothing: Any = None
    engine: Any = SimpleNamespace(apart=apart)
    generation = Generation(engine, nothing, [], 1, nothing, lambda: texts)
    generation._token_s = token
    assert generation._pause() == pytest.approx(seconds)
