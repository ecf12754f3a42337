"""How tokens become chunks: each by itself for a few, several together for many."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.server.generation import Generation


@pytest.mark.parametrize(("texts", "seconds"), [(1, 0), (3, 0), (100, 0.05), (1000, 0.1)])
def test_more_texts_wait_longer_for_a_chunk_but_never_long(texts: int, seconds: float) -> None:
    nothing: Any = None
    generation = Generation(nothing, nothing, [], 1, nothing, lambda: texts)
    assert generation._pause() == pytest.approx(seconds)
