"""Prefix caches with keys of named parts: right ones of three designs, and broken ones."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import KeyPart, TextKey
from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from pytest_roseinfer import CacheSpec, KeySpan

KEY_PARTS = (
    KeyPart("adapter"),
    KeyPart("revision", of="adapter"),
    KeyPart("salt"),
    KeyPart("weights", values=("v1", "v2")),
    KeyPart("cache dtype", values=("bfloat16", "float8_e4m3fn")),
    KeyPart("image", spans=True),
    KeyPart("embeddings mask", spans=True, values=(None, "mask")),
)


class KeyedCache(TextCache):
    """Finds a block by all tokens and parts of the key up to its end. It is right.

    It stores each token with the key of its row.
    """

    key_parts = KEY_PARTS
    block_sizes = (4, 1, 2, 3, 5, 8)

    def use_text_keys(self, keys: Sequence[TextKey]) -> None:
        self.row_keys = keys

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        rows = zip(token_ids, self.row_keys, strict=True)
        super().use_tokens([self.with_key(row, self.key_to_write(key)) for row, key in rows])

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        (key,) = self.row_keys
        return super().match_prefix(self.with_key(token_ids, self.key_to_find(key)))

    def look_up(self, token_ids: Sequence[int]) -> object:
        (key,) = self.row_keys
        return self.with_key(token_ids, self.key_to_write(key))

    def with_key(self, token_ids: Sequence[int], key: TextKey) -> Any:
        return [(token, key) for token in token_ids]

    def key_to_write(self, key: TextKey) -> TextKey:
        return key

    def key_to_find(self, key: TextKey) -> TextKey:
        return key

    def key(self, token_ids: Sequence[Any]) -> Hashable:
        last = token_ids[-1][1]
        ids = tuple(token for token, _ in token_ids)
        return ids, self.whole_parts(last), self.span_parts(last, 0, len(ids))

    def whole_parts(self, key: TextKey) -> Hashable:
        return tuple(key.parts.items())

    def span_parts(self, key: TextKey, begin: int, end: int) -> Hashable:
        """Return the spans that reach into the tokens from ``begin`` to ``end``."""
        return tuple(
            (span.part, span.begin, span.value)
            for span in self.spans(key)
            if span.begin < end and begin < span.end
        )

    def spans(self, key: TextKey) -> Sequence[KeySpan]:
        return key.spans


class ChainCache(KeyedCache):
    """Finds a block by the hash of its tokens, its parts, and the block before it. It is right."""

    def key(self, token_ids: Sequence[Any]) -> Hashable:
        size, digest = self.spec.block_size, ""
        for begin in range(0, len(token_ids), size):
            block = token_ids[begin : begin + size]
            key = block[-1][1]
            parts = self.whole_parts(key), self.span_parts(key, begin, begin + size)
            digest = self.digest(digest, [token for token, _ in block], parts)
        return digest

    def digest(self, parent: str, token_ids: Sequence[int], parts: Hashable) -> str:
        return sha256(repr((parent, token_ids, parts)).encode()).hexdigest()


class Node:
    """A node of a radix tree, with an edge for each block that follows."""

    def __init__(self) -> None:
        self.edges: dict[Hashable, Node] = {}


class RadixCache(KeyedCache):
    """Finds a block in a radix tree for each key, where images replace placeholders. It is right.

    The tree of a key begins at a root that only this key has.
    """

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.roots: dict[Hashable, Node] = {}

    def key(self, token_ids: Sequence[Any]) -> Hashable:
        size = self.spec.block_size
        node = self.roots.setdefault(self.root(token_ids[0][1]), Node())
        for begin in range(0, len(token_ids), size):
            block = token_ids[begin : begin + size]
            edge = tuple(
                self.label(token, key, begin + at) for at, (token, key) in enumerate(block)
            )
            node = node.edges.setdefault(edge, Node())
        return node

    def root(self, key: TextKey) -> Hashable:
        return tuple(key.parts.items())

    def label(self, token: int, key: TextKey, position: int) -> Hashable:
        spans = [each for each in key.spans if each.begin <= position < each.end]
        return token, *((span.part, position - span.begin, span.value) for span in spans)


RIGHT = (KeyedCache, ChainCache, RadixCache)


class LeavesAPartOut(ChainCache):
    """Base of caches that leave a part out of their keys."""

    left_out: ClassVar[str]

    def whole_parts(self, key: TextKey) -> Hashable:
        return tuple(each for each in key.parts.items() if each[0] != self.left_out)

    def spans(self, key: TextKey) -> Sequence[KeySpan]:
        return [span for span in key.spans if span.part != self.left_out]


class LeavesTheAdapterOut(LeavesAPartOut):
    """T8: leaves the adapter out of its keys."""

    left_out = "adapter"


class LeavesTheRevisionOut(LeavesAPartOut):
    """T8: knows an adapter by its name, under which another one may have been loaded since."""

    left_out = "revision"


class LeavesTheSaltOut(LeavesAPartOut):
    """7, S3: leaves the salt out of its keys."""

    left_out = "salt"


class LeavesTheWeightsOut(LeavesAPartOut):
    """T10: leaves the weights out of its keys."""

    left_out = "weights"


class LeavesTheCacheDtypeOut(LeavesAPartOut):
    """T10: leaves the dtype of the cache out of its keys."""

    left_out = "cache dtype"


class LeavesImagesOut(LeavesAPartOut):
    """S3: knows an image by its placeholder tokens only."""

    left_out = "image"


class LeavesTheMaskOut(LeavesAPartOut):
    """T8: leaves the embeddings mask out of its keys."""

    left_out = "embeddings mask"


def values_of(key: TextKey) -> Iterable[str]:
    """Return the values that are not None."""
    return [str(value) for value in key.parts.values() if value is not None]


class JoinsPartsWithoutSeparators(ChainCache):
    """T9: joins the parts of a key to one string."""

    def whole_parts(self, key: TextKey) -> Hashable:
        return "".join(values_of(key))


class JoinsPartsBackwards(RadixCache):
    """T9: names a root by the salt, the adapter and its revision in one string."""

    def root(self, key: TextKey) -> Hashable:
        names = ("salt", "adapter", "revision")
        others = tuple(value for name, value in key.parts.items() if name not in names)
        return "".join(key.parts[name] or "" for name in names), others  # type: ignore[misc]


class ListsPartsWithoutNames(ChainCache):
    """T9: lists the parts that a request has, so that a salt may be taken for an adapter."""

    def whole_parts(self, key: TextKey) -> Hashable:
        return tuple(values_of(key))


class TakesEmptyForNone(RadixCache):
    """S3: leaves out a part of the key that is an empty string."""

    def root(self, key: TextKey) -> Hashable:
        return tuple((name, value) for name, value in key.parts.items() if value)


class HashesTheFirstImageOnly(ChainCache):
    """S3: leaves out all images but the first."""

    def spans(self, key: TextKey) -> Sequence[KeySpan]:
        images = [span for span in key.spans if span.part == "image"]
        return [span for span in key.spans if span not in images[1:]]


class HashesAnImageWhereItBegins(KeyedCache):
    """S3: has an image in the key of its first block only, and not of later blocks."""

    def span_parts(self, key: TextKey, begin: int, end: int) -> Hashable:  # noqa: ARG002
        last_block = end - self.spec.block_size
        return tuple(
            (span.part, span.begin, span.value)
            for span in key.spans
            if span.begin < end and (span.part != "image" or span.begin >= last_block)
        )


class HashesAnImageWhereItEnds(RadixCache):
    """S3: replaces the last placeholder of an image only, so that its first blocks are shared."""

    def label(self, token: int, key: TextKey, position: int) -> Hashable:
        images = [span for span in key.spans if span.part == "image"]
        within = [span for span in images if span.begin <= position < span.end - 1]
        others = tuple(span for span in key.spans if span not in within)
        return super().label(token, TextKey(key.parts, others), position)


class KeysTheFirstBlockOnly(KeyedCache):
    """7, S3: has the parts of a whole text in the key of its first block only."""

    def key(self, token_ids: Sequence[Any]) -> Hashable:
        if len(token_ids) == self.spec.block_size:
            return super().key(token_ids)
        return super().key([(token, TextKey({}, key.spans)) for token, key in token_ids])


class SaltsLookupsOnly(ChainCache):
    """7, S3: looks up with the salt, and stores and shares without it."""

    def key_to_write(self, key: TextKey) -> TextKey:
        return TextKey({**key.parts, "salt": None}, key.spans)


class SaltsWritesOnly(ChainCache):
    """7, S3: stores with the salt, and looks up without it."""

    def key_to_find(self, key: TextKey) -> TextKey:
        return TextKey({**key.parts, "salt": None}, key.spans)


BROKEN = (
    LeavesTheAdapterOut,
    LeavesTheRevisionOut,
    LeavesTheSaltOut,
    LeavesTheWeightsOut,
    LeavesTheCacheDtypeOut,
    LeavesImagesOut,
    LeavesTheMaskOut,
    JoinsPartsWithoutSeparators,
    JoinsPartsBackwards,
    ListsPartsWithoutNames,
    TakesEmptyForNone,
    HashesTheFirstImageOnly,
    HashesAnImageWhereItBegins,
    HashesAnImageWhereItEnds,
    KeysTheFirstBlockOnly,
    SaltsLookupsOnly,
    SaltsWritesOnly,
)
