"""What a layer's traits make of scores, in the units that the attention kernels work with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from roseinfer.kernels.moves import taken

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.moves import Given
    from roseinfer.layer_traits import LayerTraits

_LOG2_E = 1.4426950408889634
"""Kernels work with powers of two: scores are scaled by this."""
_LOG2_E_IN_KERNELS = tl.constexpr(_LOG2_E)


class ScoreArguments(NamedTuple):
    """The arguments of a kernel that say what becomes of scores, in its order of parameters."""

    scale: float
    """It makes powers of two of the products, or arguments of the tangent where scores are
    capped."""
    cap: float
    sinks: Tensor
    slopes: Tensor
    window: int
    """0 where all before is seen."""
    capped: bool
    sinking: bool
    sloped: bool


def score_arguments(traits: LayerTraits, unused: Tensor) -> ScoreArguments:
    """Return the arguments; ``unused`` stands for what a layer does not have."""
    cap = traits.cap
    return ScoreArguments(
        traits.scale * _LOG2_E if cap is None else traits.scale / cap,
        0.0 if cap is None else cap * _LOG2_E,
        unused if traits.sinks is None else traits.sinks,
        unused if traits.slopes is None else traits.slopes,
        traits.window or 0,
        cap is not None,
        traits.sinks is not None,
        traits.slopes is not None,
    )


def numbers_by_head(given: Given) -> dict[str, int]:
    """Return the bytes that a launch reads of what it has a number of for each query head."""
    heads = given["query"].shape[1]
    flags = {"sinks": "SINKING", "slopes": "SLOPED"}
    return {name: taken(given[name], heads) for name, flag in flags.items() if given[flag]}


@triton.jit
def shape_scores(
    products, cap, slopes, heads, real, distance, CAPPED: tl.constexpr, SLOPED: tl.constexpr
):
    """Return the scores of scaled products, ``[heads, tokens]``, as powers of two."""
    scores = products
    if CAPPED:
        scores = (2 * tl.sigmoid(2 * scores) - 1) * cap  # a hyperbolic tangent
    if SLOPED:
        slope = tl.load(slopes + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS
        scores -= slope[:, None] * distance
    return scores


@triton.jit
def sink_scores(sinks, heads, real):
    """Return the score of each head's sink, as powers of two."""
    return tl.load(sinks + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS
