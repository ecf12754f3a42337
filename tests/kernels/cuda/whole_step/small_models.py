"""Small models of random weights, and caches of random tokens, for the kernel of a whole step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roseinfer.kernels.cuda.whole_step import MegakernelLayer, MegakernelWeights, StepSizes
from roseinfer.layer_traits import RotaryEmbedding

_NUM_LAYERS = 2
NUM_BLOCKS = 300


def small_sizes(block_size: int, *, rotary_dim: int = 32, normed: bool = False) -> StepSizes:
    """Return sizes at which nothing divides anything by chance."""
    return StepSizes(
        width=256, heads=6, kv_heads=2, dim=32, mlp=1024, vocab=97, rotary_dim=rotary_dim,
        block_size=block_size, out_parts=1, down_parts=2, norm_warps=4, programs=3, stages=11,
        in_flight=3, max_chunk=256, normed=normed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rig:
    sizes: StepSizes
    weights: MegakernelWeights
    caches: list[tuple[Tensor, Tensor]]
    blocks: list[int]
    length: int

    def table(self) -> Tensor:
        """Return the blocks as a row of slots has them: with room behind them."""
        return torch.tensor([[*self.blocks, *[0] * 5]])

    def copy_of_caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(keys.clone(), values.clone()) for keys, values in self.caches]


def small_rig(
    sizes: StepSizes, length: int, *, biased: bool = False, times: float = 1.0, loud: int = 0
) -> Rig:
    """Make a model, and blocks that hold ``length`` tokens in no order; all else is NaN.

    The last ``loud`` tokens have larger keys, so that it shows if they are not seen among many.
    """
    chance = _Chance()
    weights = _weights(sizes, length, chance, biased=biased, times=times)
    order = torch.randperm(NUM_BLOCKS - 1, generator=chance.generator) + 1
    blocks = order[: length // sizes.block_size + 1].tolist()
    caches = []
    for _ in range(_NUM_LAYERS):
        keys, values = (_cache(sizes, blocks, length, loud, chance) for _ in range(2))
        caches.append((keys, values))
    return Rig(sizes, weights, caches, blocks, length)


class _Chance:
    """The same numbers for every rig of the same sizes."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def numbers(self, *shape: int, spread: float) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * spread).to(torch.bfloat16)

    def gain(self, size: int) -> Tensor:
        return (torch.randn(size, generator=self.generator) * 0.1 + 1).to(torch.bfloat16)


def _weights(
    sizes: StepSizes, length: int, chance: _Chance, *, biased: bool, times: float
) -> MegakernelWeights:
    width, attended = sizes.width, sizes.heads * sizes.dim
    rotation = _rotation(sizes, length, chance)
    layers = [
        MegakernelLayer(
            norm=chance.gain(width),
            qkv=chance.numbers(sizes.qkv, width, spread=width**-0.5),
            qkv_bias=chance.numbers(sizes.qkv, spread=0.5) if biased else None,
            out=chance.numbers(width, attended, spread=attended**-0.5),
            mlp_norm=chance.gain(width),
            gate_up_weight=chance.numbers(2 * sizes.mlp, width, spread=width**-0.5),
            down=chance.numbers(width, sizes.mlp, spread=sizes.mlp**-0.5),
            rotation=rotation if layer == 0 or times == 1.0 else None,
        )
        for layer in range(_NUM_LAYERS)
    ]
    words = chance.numbers(sizes.vocab, width, spread=1.0)
    return MegakernelWeights(
        layers, words, words, chance.gain(width), 1e-5, 2 * times, times,
        sizes.dim**-0.5 * 1.4426950408889634,
    )  # fmt: skip


def _rotation(sizes: StepSizes, length: int, chance: _Chance) -> RotaryEmbedding:
    slower = 1e4 ** (torch.arange(0, sizes.rotary_dim, 2) / sizes.rotary_dim)
    angles = torch.arange(length + 1)[:, None] / slower
    both = torch.cat([angles, angles], 1)
    cosines, sines = (each.to(torch.bfloat16) for each in (both.cos(), both.sin()))
    query, key = (chance.gain(sizes.dim) if sizes.normed else None for _ in range(2))
    return RotaryEmbedding(cosines, sines, query, key, epsilon=1e-6)


def _cache(sizes: StepSizes, blocks: list[int], length: int, loud: int, chance: _Chance) -> Tensor:
    shape = NUM_BLOCKS, sizes.kv_heads, sizes.block_size, sizes.dim
    cache = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    for place in range(length):
        spread = 3.0 if place >= length - loud else 1.0
        new = chance.numbers(sizes.kv_heads, sizes.dim, spread=spread)
        cache[blocks[place // sizes.block_size], :, place % sizes.block_size] = new
    return cache
