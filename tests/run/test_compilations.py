"""A run says how many kernels it compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.search.search import compiled_so_far

if TYPE_CHECKING:
    import pytest


def test_what_is_compiled_counts_and_what_is_read_from_a_cache_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton import knobs

    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **said: heard.append(said))
    assert compiled_so_far() == 0
    for cache_hit in (False, True, False):
        assert knobs.compilation.listener is not None
        knobs.compilation.listener(
            src="a kernel", metadata={}, metadata_group={}, times=None, cache_hit=cache_hit
        )
    assert compiled_so_far() == 2
    assert [said["cache_hit"] for said in heard] == [False, True, False]  # others hear it too
    assert heard[0]["src"] == "a kernel"
