"""Caches whose memory interleaves keys and values, or packs their elements. They are right.

Each has a writer of one token, a writer of a prompt's blocks, and a reader of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import CacheFull, KVCacheAdapter, Tolerance
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]


class BulkCache(CutCache):
    """Writes a prompt block by block, four tokens at a time."""

    head_counts: ClassVar[Sequence[int]] = (2, 1, 3)
    head_dims: ClassVar[Sequence[int]] = (4, 1, 5, 8, 10)
    block_sizes: ClassVar[Sequence[int]] = (4, 2, 1, 3, 8, 16)
    VECTOR = 4

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        tokens, size = key.shape[1], self.spec.block_size
        if self.blocks_of(tokens) > len(self.unused):
            raise CacheFull
        table = self.tables[seq] = [self.take() for _ in range(self.blocks_of(tokens))]
        self.lengths[seq] = tokens
        for page, block in enumerate(table):
            at = slice(page * size, (page + 1) * size)
            self.write_block(block, key[:, at], value[:, at])

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the first tokens of a block, ``[layers, tokens, heads, head_dim]``."""
        tokens = key.shape[1]
        whole = tokens - tokens % self.VECTOR
        for cache, new in zip((self.keys, self.values), (key, value), strict=True):
            for at in range(0, whole, self.VECTOR):
                few = slice(at, at + self.VECTOR)
                cache[:, block, :, few] = new[:, few].transpose(1, 2)
        for position in range(whole, tokens):
            self.write(block, position, key[:, position], value[:, position])

    def gather(self, seq: int, layer: int) -> Pair:
        return self.peek(seq, layer)


class OneTensorCache(BulkCache):
    """Has the keys and values of a block one after the other, each token by token."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        layers, blocks, heads, size, dim = self.keys.shape
        self.both = torch.zeros(layers, blocks, 2, size, heads, dim)
        self.keys, self.values = (each.transpose(2, 3) for each in self.both.unbind(2))

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for kind, new in enumerate((key, value)):
            self.both[:, block, kind, : new.shape[1]] = new

    def gather(self, seq: int, layer: int) -> Pair:
        keys, values = (self.read(self.both[layer], seq, kind) for kind in (0, 1))
        return keys, values

    def read(self, both: torch.Tensor, seq: int, kind: int) -> torch.Tensor:
        """Read ``[tokens, heads, head_dim]`` from ``[blocks, 2, block_size, heads, head_dim]``."""
        return both[self.tables[seq], kind].flatten(0, 1)[: self.lengths[seq]]


class MixedMajorsCache(BulkCache):
    """Stores keys head by head and values token by token."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.stored_values = self.values.transpose(2, 3).contiguous()
        self.values = self.stored_values.transpose(2, 3)

    def copy(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.copy_values(source, target)

    def copy_values(self, source: int, target: int) -> None:
        self.stored_values[:, target] = self.stored_values[:, source]


class VectorPackedCache(BulkCache):
    """Packs four elements of a key together, and stores values element by element.

    Keys are ``[heads, head_dim / 4, block_size, 4]`` in a block, and values ``[heads, head_dim,
    block_size]``, as in the first kernels of vLLM. A last pack of fewer elements is padded.
    """

    PACK = 4
    arena = KVCacheAdapter.arena

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        layers, blocks, heads, size, dim = self.keys.shape
        packs = -(-dim // self.PACK)
        self.packed_keys = torch.zeros(layers, blocks, heads, packs, size, self.PACK)
        self.packed_values = torch.zeros(layers, blocks, heads, dim, size)

    def copy(self, source: int, target: int) -> None:
        for cache in (self.packed_keys, self.packed_values):
            cache[:, target] = cache[:, source]

    def write(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.packed_keys[:, block, :, :, position] = self.pack(key)
        self.packed_values[:, block, :, :, position] = value

    def pack(self, key: torch.Tensor) -> torch.Tensor:
        """Return ``[..., packs, 4]`` of ``[..., head_dim]``."""
        padded = key.new_zeros(*key.shape[:-1], self.packed_keys.shape[3] * self.PACK)
        padded[..., : key.shape[-1]] = key
        return padded.view(*key.shape[:-1], -1, self.PACK)

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        tokens = key.shape[1]
        self.packed_keys[:, block, :, :, :tokens] = self.pack(key).permute(0, 2, 3, 1, 4)
        self.packed_values[:, block, :, :, :tokens] = value.permute(0, 2, 3, 1)

    def peek(self, seq: int, layer: int) -> Pair:
        table, length = self.tables[seq], self.lengths[seq]
        packs = self.packed_keys[layer, table].permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2)
        values = self.packed_values[layer, table].permute(0, 3, 1, 2).flatten(0, 1)
        return packs[:length, :, : self.spec.head_dim], values[:length]


class Int4Cache(BulkCache):
    """Stores two codes of four bits in a byte, with a scale for each head of a token."""

    dtypes = ("int4",)
    tolerance: ClassVar[Mapping[str, Tolerance]] = {"int4": Tolerance(1 / 13)}
    arena = KVCacheAdapter.arena

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        shape = self.keys.shape
        self.codes = torch.zeros((2, *self.packed_shape(shape)), dtype=torch.uint8)
        self.stored_scales = torch.zeros(2, *shape[:4])

    def packed_shape(self, shape: Sequence[int]) -> Sequence[int]:
        return *shape[:4], -(-shape[4] // 2)

    def scales(self) -> Pair:
        return self.stored_scales[0], self.stored_scales[1]

    def copy(self, source: int, target: int) -> None:
        for stored in (self.codes, self.stored_scales):
            stored[:, :, target] = stored[:, :, source]

    def write(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        codes, scale = encode(torch.stack([key, value]))
        self.codes[:, :, block, :, position] = self.pack(codes)
        self.stored_scales[:, :, block, :, position] = scale

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        tokens = key.shape[1]
        codes, scale = encode(torch.stack([key, value]).transpose(2, 3))
        self.codes[:, :, block, :, :tokens] = self.pack(codes)
        self.stored_scales[:, :, block, :, :tokens] = scale

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack the elements of each vector in twos, the first one in the low half."""
        low, high = codes[..., ::2], torch.zeros_like(codes[..., ::2])
        high[..., : codes.shape[-1] // 2] = codes[..., 1::2]
        return low | high << 4

    def peek(self, seq: int, layer: int) -> Pair:
        table, length = self.tables[seq], self.lengths[seq]
        numbers = self.unpack(self.codes[:, layer, table]).float() - 8
        numbers = numbers * self.stored_scales[:, layer, table][..., None]
        keys, values = numbers.transpose(2, 3).flatten(1, 2)[:, :length]
        return keys, values

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        both = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        return both[..., : self.spec.head_dim]


class Int4PairsCache(Int4Cache):
    """Stores the codes of two tokens in a byte."""

    def packed_shape(self, shape: Sequence[int]) -> Sequence[int]:
        return *shape[:3], -(-shape[3] // 2), shape[4]

    def write(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        codes, scale = encode(torch.stack([key, value]))
        place = self.codes[:, :, block, :, position // 2]
        place.copy_(place & 15 | codes << 4 if position % 2 else place & 240 | codes)
        self.stored_scales[:, :, block, :, position] = scale

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        tokens = key.shape[1]
        for position in range(0, tokens - 1, 2):
            two = slice(position, position + 2)
            codes, scale = encode(torch.stack([key[:, two], value[:, two]]).transpose(2, 3))
            packed = codes[..., 0, :] | codes[..., 1, :] << 4
            self.codes[:, :, block, :, position // 2] = packed
            self.stored_scales[:, :, block, :, two] = scale
        if tokens % 2:
            self.write_last(block, tokens - 1, key[:, -1], value[:, -1])

    def write_last(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the last token of a block with an odd number of them."""
        self.write(block, position, key, value)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        both = torch.stack([packed & 15, packed >> 4], -2).flatten(-3, -2)
        return both[..., : self.spec.block_size, :]


def encode(new: torch.Tensor) -> Pair:
    """Encode ``[..., head_dim]`` in numbers from 1 to 15, with a scale for each vector."""
    scale = new.abs().amax(-1) / 7
    return ((new / scale[..., None]).round() + 8).to(torch.uint8), scale


RIGHT = (
    BulkCache,
    OneTensorCache,
    MixedMajorsCache,
    VectorPackedCache,
    Int4Cache,
    Int4PairsCache,
)
