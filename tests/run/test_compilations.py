"""The number of kernels that a run compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.search.search import compiled_so_far

if TYPE_CHECKING:
    import pytest


def test_compilations_are_counted_without_cache_hits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton import knobs

    forwarded: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **call: forwarded.append(call))
    assert compiled_so_far() == 0
    for cache_hit in (False, True, False):
        assert knobs.compilation.listener is not None
        knobs.compilation.listener(
            src="a kernel", metadata={}, metadata_group={}, times=None, cache_hit=cache_hit
        )
    assert compiled_so_far() == 2
    assert [call["cache_hit"] for call in forwarded] == [False, True, False]  # other listeners too
    assert forwarded[0]["src"] == "a kernel"
