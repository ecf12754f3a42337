"""Caches that store a byte per element: with a scale per token or per block, or without scales.

Right ones come first, then broken ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from pytest_roseinfer import KVCacheAdapter, Tolerance

from .text_cache import TextCache
from .truncating_caches import CutCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]


def encode(new: torch.Tensor) -> Pair:
    """Encode ``[..., head_dim]`` in bytes, with a scale for each row."""
    scale = new.abs().amax(-1) / 127
    return (new / scale[..., None]).round(), scale


class Float8(CutCache):
    """Stores elements in the dtype itself, as vLLM does with scales of 1."""

    dtypes = ("float8_e4m3fn",)
    tolerance: ClassVar[Mapping[str, Tolerance]] = {
        "float8_e4m3fn": Tolerance(1 / 16, tensors="bfloat16")
    }

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.keys, self.values = (each.to(torch.float8_e4m3fn) for each in self.arena())

    def peek(self, seq: int, layer: int) -> Pair:
        keys, values = (
            cache[layer].bfloat16()[self.tables[seq]].transpose(1, 2).flatten(0, 1)
            for cache in self.arena()
        )
        keys, values = keys[: self.lengths[seq]], values[: self.lengths[seq]]
        return keys, values


class Int8Tokens(CutCache):
    """Has a scale for each head of a token."""

    dtypes: ClassVar[Sequence[str]] = ("int8",)
    tolerance: ClassVar[Mapping[str, Tolerance]] = {"int8": Tolerance(1 / 250)}

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        shape = self.keys.shape[: self.dimensions()]
        self.keys, self.values = self.keys.to(torch.int8), self.values.to(torch.int8)
        self.key_scales, self.value_scales = torch.zeros(shape), torch.zeros(shape)

    def dimensions(self) -> int:
        return 4

    def scales(self) -> Pair:
        return self.key_scales, self.value_scales

    def copy(self, source: int, target: int) -> None:
        super().copy(source, target)
        for scales in (self.key_scales, self.value_scales):
            scales[:, target] = scales[:, source]

    def write(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.write_one(self.keys, self.key_scales, block, position, key)
        self.write_one(self.values, self.value_scales, block, position, value)

    def write_one(
        self, codes: torch.Tensor, scales: torch.Tensor, block: int, at: int, new: torch.Tensor
    ) -> None:
        codes[:, block, :, at], scales[:, block, :, at] = encode(new)

    def peek(self, seq: int, layer: int) -> Pair:
        keys = self.read(self.keys[layer], self.key_scales[layer], self.tables[seq])
        values = self.read(self.values[layer], self.value_scales[layer], self.tables[seq])
        return keys[: self.lengths[seq]], values[: self.lengths[seq]]

    def read(self, codes: torch.Tensor, scales: torch.Tensor, table: list[int]) -> torch.Tensor:
        block_scales = scales[self.scaled_by(table)]
        block_scales = (
            block_scales[..., None] if block_scales.ndim == 3 else block_scales[..., None, None]
        )
        return (codes[table] * block_scales).transpose(1, 2).flatten(0, 1)

    def scaled_by(self, table: list[int]) -> list[int]:
        """Return the blocks whose scales these blocks are read with."""
        return table


class Int8Blocks(Int8Tokens):
    """Has a scale for each head of a block: a larger token changes the codes before it."""

    tolerance: ClassVar[Mapping[str, Tolerance]] = {"int8": Tolerance(1 / 30, over="block")}
    block_sizes = (4, 1, 2, 3, 5, 8)

    def dimensions(self) -> int:
        return 3

    def write_one(
        self, codes: torch.Tensor, scales: torch.Tensor, block: int, at: int, new: torch.Tensor
    ) -> None:
        before = self.scale_before(scales[:, block].clone(), at)
        scale = torch.maximum(before, new.abs().amax(-1) / 127)
        ratio = (before / scale)[..., None, None]
        codes[:, block, :, :at] = (codes[:, block, :, :at] * ratio).round()
        codes[:, block, :, at] = (new / scale[..., None]).round()
        scales[:, block] = scale

    def scale_before(self, scale: torch.Tensor, at: int) -> torch.Tensor:
        return scale if at else torch.zeros_like(scale)


class KeepsAnOldScale(Int8Blocks):
    """S14: begins a reused block with the scale it had."""

    def scale_before(self, scale: torch.Tensor, at: int) -> torch.Tensor:  # noqa: ARG002
        return scale


class KeepsAnOldScaleUnseen(KeepsAnOldScale):
    """Does the same, and does not show its scales."""

    scales = KVCacheAdapter.scales


class ReadsTheScaleOfAnotherBlock(Int8Blocks):
    """S14: reads every block of a table with the last block's scale."""

    def scaled_by(self, table: list[int]) -> list[int]:
        return table[-1:] * len(table)


class CopiesNoScales(Int8Tokens):
    """S14: copies codes without scales in copy-on-write."""

    def copy(self, source: int, target: int) -> None:
        CutCache.copy(self, source, target)


class CopiesTheScalesOfKeys(Int8Blocks):
    """S14: copies codes with the scales of keys only in copy-on-write."""

    def copy(self, source: int, target: int) -> None:
        CutCache.copy(self, source, target)
        self.key_scales[:, target] = self.key_scales[:, source]


class ReadsOneScaleForAll(Int8Tokens):
    """S14: reads all tokens of a block with the scale of its last token."""

    def read(self, codes: torch.Tensor, scales: torch.Tensor, table: list[int]) -> torch.Tensor:
        return super().read(codes, scales[..., -1:].expand(scales.shape), table)


class WritesOneScaleForAllLayers(Int8Tokens):
    """Stores the scales of all layers at one address, as in kvcached 434."""

    def write_one(
        self, codes: torch.Tensor, scales: torch.Tensor, block: int, at: int, new: torch.Tensor
    ) -> None:
        super().write_one(codes, scales, block, at, new)
        scales[:, block, :, at] = scales[-1, block, :, at].clone()


class ResetsScalesLate(Int8Tokens):
    """Sets scales to 1 on their first use, after some were written: vLLM 51091."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.looked_for = False

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        if not self.looked_for:
            self.looked_for = True
            for scales in (self.key_scales, self.value_scales):
                scales.fill_(1.0)


class EncodesAgain(Int8Tokens):
    """Re-encodes a block for each new token, rounding down, and shows neither codes nor scales."""

    arena = KVCacheAdapter.arena
    scales = KVCacheAdapter.scales

    def copy(self, source: int, target: int) -> None:
        for each in (self.keys, self.values, self.key_scales, self.value_scales):
            each[:, target] = each[:, source]

    def write_one(
        self, codes: torch.Tensor, scales: torch.Tensor, block: int, at: int, new: torch.Tensor
    ) -> None:
        super().write_one(codes, scales, block, at, new)
        scales[:, block, :, :at] *= 1.001


class Attends(Int8Tokens):
    """Attends to the tokens that it reads back."""

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        outputs = []
        for row, seq in zip(query, seqs, strict=True):
            keys, values = (
                each.repeat_interleave(len(row) // each.shape[1], 1).transpose(0, 1)
                for each in self.attended(seq, layer)
            )
            outputs.append(scaled_dot_product_attention(row[:, None], keys, values)[:, 0])
        return torch.stack(outputs)

    def attended(self, seq: int, layer: int) -> Pair:
        return self.peek(seq, layer)


class AttendsWithOneScale(Attends):
    """Attends with the scale of the last token for all tokens."""

    def attended(self, seq: int, layer: int) -> Pair:
        keys, values = self.peek(seq, layer)
        return keys * (keys[-1:].abs().max() / keys.abs().amax((1, 2), keepdim=True)), values


class Int8Texts(TextCache):
    """Reuses prefixes, with a scale for each head of a token. It is right."""

    dtypes = ("int8",)
    tolerance: ClassVar[Mapping[str, Tolerance]] = {"int8": Tolerance(1 / 250)}
    head_dims: ClassVar[Sequence[int]] = (4, 1)
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.key_scales = torch.zeros(self.keys.shape[:-1])
        self.value_scales = torch.zeros(self.keys.shape[:-1])

    def scales(self) -> Pair:
        return self.key_scales, self.value_scales

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write the codes and the scale of each token after the stored ones."""
        for at, token in enumerate(token_ids):
            size, stored = self.spec.block_size, len(self.token_ids.get(seq, ()))
            codes, scales = zip(*(encode(new[:, at]) for new in (key, value)), strict=True)
            super().write(seq, [token], codes[0][:, None], codes[1][:, None])
            block = self.tables[seq][stored // size]
            for own, scale in zip(self.scales(), scales, strict=True):
                own[:, block, :, stored % size] = scale

    def peek(self, seq: int, layer: int) -> Pair:
        table, length = self.tables[seq], len(self.token_ids[seq])
        keys, values = (
            (codes[layer, table] * scales[layer, table][..., None]).transpose(1, 2).flatten(0, 1)
            for codes, scales in zip(self.arena(), self.scales(), strict=True)
        )
        return keys[:length], values[:length]


class ResetsScalesOfCachedBlocks(Int8Texts):
    """Resets the scales of a block without holders, which a text may still find."""

    def drop(self, block: int) -> None:
        super().drop(block)
        if not self.holders[block]:
            self.key_scales[:, block] = 1


RIGHT = (Float8, Int8Tokens, Int8Blocks, Int8Texts)
BROKEN = (
    KeepsAnOldScale,
    KeepsAnOldScaleUnseen,
    ReadsTheScaleOfAnotherBlock,
    CopiesNoScales,
    CopiesTheScalesOfKeys,
    ReadsOneScaleForAll,
    WritesOneScaleForAllLayers,
    ResetsScalesLate,
    EncodesAgain,
    ResetsScalesOfCachedBlocks,
)
