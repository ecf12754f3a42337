"""For which models there is a kernel of a whole step, and how much of a GPU it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.persistent.sizes import StepSizes
from roseinfer.kernels.products.streamed import num_parts
from roseinfer.kernels.rms_norm import warps_of_row
from roseinfer.kernels.runtime import power_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kernels.persistent.step_weights import StepWeights
    from roseinfer.layer_traits import LayerTraits

_CAPABILITY = 9
"""Copies of tiles by tensor maps came with it."""
_WARPS = 8
_IN_FLIGHT = 32 << 10
"""Bytes of a program on their way. More made what others wait for slower on an H200."""
_LEAST_IN_FLIGHT = 2
"""Tiles."""
_MOST_CHUNKS = (512, 1024, 256)
"""Inputs of the largest tiles: those that are tried first are liked best."""
_LARGEST_HEAD = 128
_LARGEST_GROUP = 16
_LEAST_NORMED = 1024
"""Elements of a token's keys, with KV heads padded to a power of two, from which on Triton's kernel
that norms heads sums eight squares in each thread, as this one does. With fewer it sums fewer in
each: on an H200, 3 and 7 of 2,400 steps had other bits then, and 0 of 2,400 from here on."""
_ALIGNED = 16
"""Bytes, for copies of tiles, and for tokens that are read in pairs of numbers."""


def sizes_of(weights: StepWeights, head_dim: int, keys: Tensor, programs: int) -> StepSizes:
    """Return a model's sizes, on a cache whose keys are ``[blocks, kv_heads, block_size, dim]``."""
    layer = weights.layers[0]
    width, attended = layer.out.shape
    mlp = layer.down.shape[1]
    rotations = weights.rotations()
    return StepSizes(
        width=width,
        heads=attended // head_dim,
        kv_heads=keys.shape[1],
        dim=head_dim,
        mlp=mlp,
        vocab=len(weights.head),
        turn=rotations[0].cosines.shape[1] if rotations else head_dim,
        block_size=keys.shape[2],
        out_parts=num_parts(width, attended),
        down_parts=num_parts(width, mlp),
        norm_warps=warps_of_row(width),
        programs=programs,
        normed=any(each.query_gain is not None for each in rotations),
    )


def why_not(
    sizes: StepSizes, weights: StepWeights, keys: Tensor, traits: Sequence[LayerTraits]
) -> str:
    """Say why the kernel cannot compute this model; return nothing where it can."""
    asked_for = {name for layer in traits for name in layer.asked_for} - {"scale"}
    rotations = weights.rotations()
    odd = [
        (asked_for, f"{', '.join(sorted(asked_for))} in its attention"),
        (len({layer.scale for layer in traits}) > 1, "another scale in some layers"),
        (sizes.dim % 16 or sizes.dim > _LARGEST_HEAD, f"heads of {sizes.dim}"),
        (sizes.block_size % 16, f"blocks of {sizes.block_size} tokens"),
        (sizes.turn % 2 or sizes.turn > sizes.dim, f"a rotation of {sizes.turn} numbers"),
        (sizes.heads // sizes.kv_heads > _LARGEST_GROUP, "many query heads for one of keys"),
        (
            min(sizes.width, sizes.qkv, sizes.mlp) < sizes.programs,
            "fewer rows than there are programs",
        ),
        (0 in sizes.chunks, "inputs of its layers that cannot be cut into tiles"),
        (any(each.together for each in rotations), "norms of all heads together"),
        (
            sizes.normed and not _sums_as_triton(sizes),
            f"norms of {sizes.kv_heads} KV heads of {sizes.dim}, which are summed in another order",
        ),
        (len({(each.epsilon, each.cosines.shape) for each in rotations}) > 1, "other rotations"),
        (any(each.dtype is not torch.bfloat16 for each in weights.tensors()), "other floats"),
        (not all(_lies_well(each) for each in weights.tensors()), "weights that lie otherwise"),
        (keys.dtype is not torch.bfloat16, f"a cache of {keys.dtype}"),
        (not keys[0].is_contiguous() or not _blocks_lie_well(keys), "blocks that lie otherwise"),
    ]
    return next((what for wrong, what in odd if wrong), "")


def why_not_on(device: torch.device) -> str:
    """Say why the kernel cannot run on a device; return nothing where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} runs no CUDA C++"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= _CAPABILITY else f"compute capability {major}.{minor} has no tensor maps"


def with_ring(sizes: StepSizes, shared_bytes: int) -> StepSizes | None:
    """Choose how many tiles a program holds, and how large; None where too few find room."""
    for most_chunk in _MOST_CHUNKS:
        cut = replace(sizes, most_chunk=most_chunk)
        if 0 in cut.chunks:
            continue
        stages = (shared_bytes - cut.room()) // cut.slot()
        in_flight = min(_IN_FLIGHT // cut.tile(), stages - _WARPS)
        if in_flight >= _LEAST_IN_FLIGHT:
            return replace(cut, stages=stages, in_flight=in_flight)
    return None


def _sums_as_triton(sizes: StepSizes) -> bool:
    """Return True if both kernels add up the squares of a head in the same order."""
    padded = power_of_two(sizes.dim)
    return padded == sizes.dim and power_of_two(sizes.kv_heads) * padded >= _LEAST_NORMED


def _blocks_lie_well(keys: Tensor) -> bool:
    return keys.data_ptr() % _ALIGNED == 0 and keys.stride(0) * keys.element_size() % _ALIGNED == 0


def _lies_well(weight: Tensor) -> bool:
    return weight.is_contiguous() and weight.data_ptr() % _ALIGNED == 0
