"""The few shapes that are drawn where kernels are compiled, since each new one costs seconds.

Which shapes meet is searched for on a CPU, where Triton's kernels are interpreted and a shape
costs nothing; a GPU shows what compilers and hardware make of each size.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

_T = TypeVar("_T")
Shape = tuple[tuple[int, ...], str]
"""What kernels are compiled for: heads, the sizes of a head and of a block; and a dtype."""


class Bounds(NamedTuple):
    """The most elements that a token and a block may have."""

    of_a_token: int
    of_a_block: int

    def allow(self, num_heads: int, head_dim: int, block_size: int) -> bool:
        of_a_token = num_heads * head_dim
        return of_a_token <= self.of_a_token and of_a_token * block_size <= self.of_a_block


@cache
def few_shapes(
    head_counts: tuple[int, ...],
    head_dims: tuple[int, ...],
    block_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    bounds: Bounds,
) -> tuple[Shape, ...]:
    """Choose shapes, small and large by turns, so that all that is listed occurs in one."""
    listed = head_counts, head_dims, block_sizes
    allowed = [sizes for sizes in product(*listed) if bounds.allow(*sizes)]
    allowed.sort(key=prod)
    missing = {entry for sizes in allowed for entry in enumerate(sizes)}
    chosen: list[tuple[int, ...]] = []
    while missing:
        news = [len(missing & {*enumerate(sizes)}) for sizes in allowed]
        best = [sizes for sizes, new in zip(allowed, news, strict=True) if new == max(news)]
        chosen.append(best[-(len(chosen) % 2)])
        missing -= {*enumerate(chosen[-1])}
    return tuple(zip(chosen, cycle(dtypes), strict=False))


def few_of(choices: Sequence[_T], spec: CacheSpec) -> Sequence[_T]:
    """Keep the first choice and one that depends on the shape."""
    others = choices[1:]
    at = spec.num_heads + spec.head_dim + 2 * spec.block_size
    return [choices[0], others[at % len(others)]] if others else choices
