"""Keeps what the rows of the next write say, and in which namespaces they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.cache import KVCacheAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence


class ComingTexts(KVCacheAdapter):
    coming: Sequence[Sequence[int]] = ()
    """What each row says."""
    names_coming: Sequence[int] = ()
    """The namespace of each row; none where the cache knows none."""

    def texts(self, said: Sequence[Sequence[int]]) -> None:
        self.coming = said

    def hear_namespaces(self, names: Sequence[int]) -> None:
        self.names_coming = names

    def namespace(self, row: int) -> int:
        return self.names_coming[row] if self.names_coming else 0
