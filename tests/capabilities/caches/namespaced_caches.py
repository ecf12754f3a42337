"""Caches that keep a block for every text of every namespace: a right one, and wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pytest_roseinfer import CacheSpec


class NamespacedCache(TextCache):
    """Each token is known together with its namespace."""

    def use_namespaces(self, names: Sequence[int]) -> None:
        self.names = names

    def use_tokens(self, said: Sequence[Sequence[int]]) -> None:
        super().use_tokens([self.named(*row) for row in zip(said, self.names, strict=True)])

    def match_prefix(self, said: Sequence[int]) -> int:
        return super().match_prefix(self.named(said, *self.names))

    def look_up(self, said: Sequence[int]) -> object:
        return self.named(said, *self.names)

    def named(self, said: Sequence[int], name: int) -> Any:
        return [(name, token) for token in said]


class LeavesTheNamespaceOut(NamespacedCache):
    """7, S3: its keys are of tokens alone."""

    def key(self, said: Sequence[Any]) -> Hashable:
        return tuple(token for _, token in said)


class NamesTheFirstBlockAlone(NamespacedCache):
    """7, S3: the namespace is part of the key of a first block, and of no other."""

    def key(self, said: Sequence[Any]) -> Hashable:
        tokens = tuple(token for _, token in said)
        return (said[0][0], tokens) if len(said) == self.spec.block_size else tokens


class LooksUpInAll(NamespacedCache):
    """7, S3: sequences share within their namespaces, but a lookup knows of none."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.names_of_all: set[int] = set()

    def use_namespaces(self, names: Sequence[int]) -> None:
        super().use_namespaces(names)
        self.names_of_all.update(names)

    def match_prefix(self, said: Sequence[int]) -> int:
        return max(
            TextCache.match_prefix(self, self.named(said, name)) for name in self.names_of_all
        )


BROKEN = (LeavesTheNamespaceOut, NamesTheFirstBlockAlone, LooksUpInAll)
