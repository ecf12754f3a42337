"""Caches whose writers and readers differ in the layout of some tokens, elements or lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.capabilities.caches.packed_cache import (
    BulkCache,
    Int4Cache,
    Int4PairsCache,
    MixedMajorsCache,
    OneTensorCache,
    VectorPackedCache,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    Pair = tuple[torch.Tensor, torch.Tensor]


class WritesPromptsByHead(OneTensorCache):
    """T24: writes prompts head by head, and single tokens token by token."""

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        layers, _, _, size, heads, dim = self.both.shape
        for kind, new in enumerate((key, value)):
            by_head = self.both[:, block, kind].view(layers, heads, size, dim)
            by_head[:, :, : new.shape[1]] = new.transpose(1, 2)


class ReadsValuesAfterAllKeys(OneTensorCache):
    """T24: reads the values of all blocks after the keys of all blocks."""

    def read(self, both: torch.Tensor, seq: int, kind: int) -> torch.Tensor:
        blocks = len(both)
        apart = both.view(2, blocks, *both.shape[2:]).transpose(0, 1)
        return super().read(apart, seq, kind)


class CopiesHeadsForTokens(MixedMajorsCache):
    """T24: copies values as if they were stored by head: as many tokens as there are heads."""

    def copy_values(self, source: int, target: int) -> None:
        heads = slice(self.spec.num_heads)
        self.stored_values[:, target, heads] = self.stored_values[:, source, heads]


class PacksWholeVectorsOnly(VectorPackedCache):
    """T24: writes the packs of a key that are full, and not the elements after them."""

    def pack(self, key: torch.Tensor) -> torch.Tensor:
        packed = super().pack(key)
        packed[..., self.spec.head_dim // self.PACK :, :] = 0
        return packed


class PadsPacksInFront(VectorPackedCache):
    """T24: pads the last pack of a prompt's keys in front, where it has fewer elements."""

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write_block(block, key, value)
        if rest := self.spec.head_dim % self.PACK:
            last = self.packed_keys[:, block, :, -1]
            last.copy_(last.roll(self.PACK - rest, -1))


class PacksPromptsByElement(VectorPackedCache):
    """T24: writes a prompt's packs element by element, and reads them token by token."""

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write_block(block, key, value)
        if key.shape[1] == self.spec.block_size:
            packs = self.packed_keys[:, block]
            packs.copy_(packs.transpose(-1, -2).contiguous().view(packs.shape))


class DropsTheLastHalfByte(Int4Cache):
    """T24: packs the elements of a vector in twos, and drops the last of an odd number."""

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        packed = super().pack(codes)
        packed[..., codes.shape[-1] // 2 :] = 0
        return packed


class PacksPromptsHighHalfFirst(Int4Cache):
    """T24: packs a prompt's elements with the first one in the high half of a byte."""

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write_block(block, key, value)
        codes = self.codes[:, :, block, :, : key.shape[1]]
        codes.copy_(codes << 4 | codes >> 4)


class ClearsTheOtherHalf(Int4PairsCache):
    """T24: writes a whole byte for one token, whose other half is the token before it."""

    def write(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        codes, scale = encode(torch.stack([key, value]))
        self.codes[:, :, block, :, position // 2] = codes << 4 if position % 2 else codes
        self.stored_scales[:, :, block, :, position] = scale


class PacksAnOddTokenHigh(Int4PairsCache):
    """T24, T25: stores the last token of a prompt of odd length in the high half of its byte."""

    def write_last(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write_last(block, position, key, value)
        self.codes[:, :, block, :, position // 2] <<= 4


class WritesATailOfThreeWrong(BulkCache):
    """T25: stores the last of three tokens after the last four as the one before it."""

    REST, VECTOR = 3, 4

    def write_block(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write_block(block, key, value)
        tokens = key.shape[1]
        if tokens % self.VECTOR == self.REST and tokens > 1:
            self.write(block, tokens - 1, key[:, tokens - 2], value[:, tokens - 2])


class WritesATailOfSevenWrong(WritesATailOfThreeWrong):
    """T25: stores the last of seven tokens after the last eight as the one before it."""

    REST, VECTOR = 7, 8


class ReadsATailOfThreeWrong(BulkCache):
    """T25: reads the last token of lengths of 3 modulo 4 as the one before it."""

    REST, VECTOR = 3, 4

    def gather(self, seq: int, layer: int) -> Pair:
        keys, values = (each.clone() for each in super().gather(seq, layer))
        if len(keys) % self.VECTOR == self.REST:
            keys[-1], values[-1] = keys[-2], values[-2]
        return keys, values


class ReadsATailOfSevenWrong(ReadsATailOfThreeWrong):
    """T25: reads the last token of lengths of 7 modulo 8 as the one before it."""

    REST, VECTOR = 7, 8


class ReadsATailOfFifteenWrong(ReadsATailOfThreeWrong):
    """T25: reads the last token of lengths of 15 modulo 16 as the one before it."""

    REST, VECTOR = 15, 16


class WritesABatchOfThreeWrong(BulkCache):
    """T25: stores the key of the last row of three, after the last four, as that of the row before.

    Values are right.
    """

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len(seqs) % self.VECTOR == 3:
            key = torch.cat([key[:, :-1], key[:, -2:-1]], 1)
        super().append(seqs, key, value)


BROKEN = (
    WritesPromptsByHead,
    ReadsValuesAfterAllKeys,
    CopiesHeadsForTokens,
    PacksWholeVectorsOnly,
    PadsPacksInFront,
    PacksPromptsByElement,
    DropsTheLastHalfByte,
    PacksPromptsHighHalfFirst,
    ClearsTheOtherHalf,
    PacksAnOddTokenHigh,
    WritesATailOfThreeWrong,
    WritesATailOfSevenWrong,
    ReadsATailOfThreeWrong,
    ReadsATailOfSevenWrong,
    ReadsATailOfFifteenWrong,
    WritesABatchOfThreeWrong,
)
