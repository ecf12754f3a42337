"""Caches with prefix reuse in namespaces: a right one, and broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pytest_roseinfer import CacheSpec


class NamespacedCache(TextCache):
    """Stores each token together with its namespace."""

    def use_namespaces(self, namespaces: Sequence[int]) -> None:
        self.namespaces = namespaces

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        super().use_tokens(
            [self.with_namespace(*row) for row in zip(token_ids, self.namespaces, strict=True)]
        )

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return super().match_prefix(self.with_namespace(token_ids, *self.namespaces))

    def look_up(self, token_ids: Sequence[int]) -> object:
        return self.with_namespace(token_ids, *self.namespaces)

    def with_namespace(self, token_ids: Sequence[int], namespace: int) -> Any:
        return [(namespace, token) for token in token_ids]


class LeavesTheNamespaceOut(NamespacedCache):
    """7, S3: has keys of tokens without namespaces."""

    def key(self, token_ids: Sequence[Any]) -> Hashable:
        return tuple(token for _, token in token_ids)


class NamesTheFirstBlockOnly(NamespacedCache):
    """7, S3: has the namespace in the key of a first block only."""

    def key(self, token_ids: Sequence[Any]) -> Hashable:
        tokens = tuple(token for _, token in token_ids)
        return (token_ids[0][0], tokens) if len(token_ids) == self.spec.block_size else tokens


class LooksUpInAll(NamespacedCache):
    """7, S3: shares within namespaces, and looks up in all of them."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.all_namespaces: set[int] = set()

    def use_namespaces(self, namespaces: Sequence[int]) -> None:
        super().use_namespaces(namespaces)
        self.all_namespaces.update(namespaces)

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return max(
            TextCache.match_prefix(self, self.with_namespace(token_ids, namespace))
            for namespace in self.all_namespaces
        )


BROKEN = (LeavesTheNamespaceOut, NamesTheFirstBlockOnly, LooksUpInAll)
