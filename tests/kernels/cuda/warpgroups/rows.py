"""Rows that decode, and what is attended to from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda.decode_attention import RowSizes, attend_rows
from tests.kernels.cuda.warpgroups.prompts import Attention, Prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding


class Rows:
    """New tokens of sequences, which are yet to be stored behind so many."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: str = "cpu",
        *,
        sharp: float = 3.0,
        rotates: bool = True,
        **heads: int,
    ) -> None:
        self.prompts = Prompts([(length, 1) for length in lengths], **heads)
        self.attention = Attention(self.prompts, device, sharp=sharp, rotates=rotates)
        self.lengths, self.sharp = self.attention.positions, sharp
        size, tables = self.prompts.block_size, self.attention.tables
        self.places = tables.gather(1, (self.lengths // size)[:, None])[:, 0], self.lengths % size
        for cache in self.caches:
            cache[self.places[0], :, self.places[1]] = float("nan")

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self.attention.k_cache, self.attention.v_cache

    def sizes(self, warps: int, stages: int) -> RowSizes:
        given = self.prompts
        return RowSizes(given.dim, given.group, given.block_size, warps, stages)

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.query, self.attention.key, self.attention.value

    def computed(self, sizes: RowSizes | None = None, program: Program | None = None) -> Tensor:
        """Have the kernel compute it, and store the tokens."""
        given = *self.heads, *self.caches, *self.told
        return attend_rows(*given, program=program, sizes=sizes)

    @property
    def told(self) -> tuple[Tensor, Tensor, LayerTraits, RotaryEmbedding | None]:
        """The arguments of a kernel behind the caches."""
        own = self.attention
        return own.tables, self.lengths, own.traits, own.rotation

    def with_new(self) -> tuple[Tensor, Tensor]:
        """Return the caches as they should be with the new tokens."""
        own = self.attention
        rotation, key = own.rotation, own.key
        new = key if rotation is None else rotation.apply_to_keys(key, self.lengths), own.value
        caches = tuple(cache.clone() for cache in self.caches)
        for cache, numbers in zip(caches, new, strict=True):
            cache[self.places[0], :, self.places[1]] = numbers
        return caches[0], caches[1]

    def off(self, sizes: RowSizes, program: Program) -> float:
        """Return how far results are off, for how large the numbers are.

        It is infinitely far where the caches are not as they should be.
        """
        want = self.with_new()
        got = self.computed(sizes, program).double().cpu()
        if not all(map(same_bits, self.caches, want)):
            return float("inf")
        return float((got - self.attention.expected()).abs().max()) / self.sharp


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits: what is no number equals itself too."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))
