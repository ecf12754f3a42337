"""Launching of decode attention in CUDA, which has the bits of Triton's kernel."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    STRIP,
    TensorMap,
    angles,
    are_caches_tma_aligned,
    are_heads_aligned,
    are_sizes_supported,
    cache_row_strides,
    cache_tiles,
    has_plain_scores,
    num_multiprocessors,
    supports_wgmma,
)
from roseinfer.kernels.cuda.toolchain import read_source
from roseinfer.kernels.kernel import CudaKernel
from roseinfer.kernels.runtime import cdiv
from roseinfer.kernels.triton.decode_attention import APPEND_AND_ATTEND_TRAFFIC
from roseinfer.kernels.triton.softmax import score_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

# Compile-time sizes of the decode kernel, and its source.


_MULTIPROCESSOR_BYTES = 227 << 10
"""Shared memory of a multiprocessor."""
_REST = 2 << 10
"""Bytes for barriers and scores of the new token, and for the rest of the last 1,024 bytes."""
_RESERVED_BYTES = 1 << 10
"""Bytes of a multiprocessor's shared memory that CUDA reserves for each program."""
_WARPS_AND_STAGES = ((4, 4), (4, 2), (3, 2), (2, 2), (1, 3))
"""Warps per program and stages per warp; choices for few programs first."""
_SEQUENTIAL_CHOICE = 3
"""Index of the choice for programs that run one after the other."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Compile-time sizes, which the source has as macros in capitals."""

    dim: int
    """Elements per head."""
    group: int
    """Query heads that share a KV head."""
    block_size: int
    warps: int
    stages: int
    """Stages of a warp's ring, each for keys or values of a tile."""

    @classmethod
    def choose(cls, dim: int, group: int, block_size: int, programs: int) -> RowSizes:
        """Return the fastest sizes for ``programs`` programs on a multiprocessor.

        All programs are resident at once, with as many stages as fit. If none fit, the programs run
        one after the other.
        """
        choices = [cls(dim, group, block_size, *each) for each in _WARPS_AND_STAGES]
        room = _MULTIPROCESSOR_BYTES // programs - _RESERVED_BYTES
        return next(
            (each for each in choices if each.shared_bytes <= room), choices[_SEQUENTIAL_CHOICE]
        )

    def are_supported(self) -> bool:
        """Return True if the kernel can be compiled for them."""
        return are_sizes_supported(self.dim, self.group, self.block_size)

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: tiles, partial results, the new token, barriers."""
        of_warp = self.stages * self.dim // SIDE * STRIP + self.group * (self.dim + 6) * 4
        heads = (16 if self.group > 8 else 8) + 2
        return self.warps * of_warp + heads * (self.dim + 8) * 2 + _REST

    def defines(self) -> dict[str, int]:
        named = {**asdict(self), "shared_bytes": self.shared_bytes}
        return {name.upper(): value for name, value in named.items()}

    def source(self, headers: Mapping[str, str] | None = None) -> str:
        """Return the kernel's source; ``headers`` replace its own by name."""
        return read_source("decode_attention.cu", headers)


_MIN_PROGRAMS = 24
"""Smallest number of programs. They are about as fast as several for each context, which Triton's
kernel has, even if contexts are long. Fewer are faster only if contexts are short, which a graph
cannot know."""


_POINTERS = (
    "query", "key", "value", "k_cache", "v_cache", "cosines", "sines", "out", "tables", "lengths",
)  # fmt: skip
_STRIDES = (
    *(f"{name}_{of}" for name in ("query", "key", "value", "out") for of in ("token", "head")),
    *("block_rows", "head_rows", "table_width", "length_stride"),
)
KERNEL = CudaKernel(
    "attend_rows",
    {
        **dict.fromkeys(("keys", "values"), TensorMap),
        **dict.fromkeys(_POINTERS, ctypes.c_void_p),
        **dict.fromkeys(_STRIDES, ctypes.c_longlong),
        "kv_heads": ctypes.c_int,
        "scale": ctypes.c_float,
    },
    APPEND_AND_ATTEND_TRAFFIC,
    fallback="decode attention runs in Triton's kernel",
)


def can_attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    traits: LayerTraits,
) -> bool:
    """Return True if the kernel is the fastest here; compile it then."""
    fit = (
        has_plain_scores(traits)
        and len(query) * k_cache.shape[1] >= _MIN_PROGRAMS
        and supports_wgmma(query.device, query.dtype)
        and k_cache.dtype is query.dtype
        and all(map(are_heads_aligned, (query, key, value)))
        and are_caches_tma_aligned(k_cache, v_cache)
    )
    if not fit:
        return False
    sizes = _sizes(query, k_cache)
    return sizes.are_supported() and KERNEL.load(sizes, query.device) is not None


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    traits: LayerTraits,
    rotation: RotaryEmbedding | None = None,
    *,
    program: Program | None = None,
    sizes: RowSizes | None = None,
) -> Tensor:
    """Compute the same as ``append_and_attend``.

    On a GPU, stored keys and values of earlier tokens may be read before the previous kernel has
    ended, as may ``lengths`` and ``tables``: that kernel must not write them. ``program`` replaces
    the device's kernel, for ``sizes``.
    """
    sizes = sizes or _sizes(query, k_cache)
    program = program or KERNEL.load(sizes, query.device)
    assert program is not None
    out = query.new_empty(query.shape)
    kv_heads = k_cache.shape[1]
    block_rows, head_rows = cache_row_strides(k_cache)
    KERNEL.launch(
        program, len(query) * kv_heads, keys=cache_tiles(k_cache), values=cache_tiles(v_cache),
        query=query, key=key, value=value, k_cache=k_cache, v_cache=v_cache, out=out,
        tables=tables, lengths=lengths, **angles(rotation),
        query_token=query.stride(0), query_head=query.stride(1),
        key_token=key.stride(0), key_head=key.stride(1),
        value_token=value.stride(0), value_head=value.stride(1),
        out_token=out.stride(0), out_head=out.stride(1),
        block_rows=block_rows, head_rows=head_rows,
        table_width=tables.stride(0), length_stride=lengths.stride(0),
        kv_heads=kv_heads, scale=score_arguments(traits, query)["scale"],
    )  # fmt: skip
    return out


def _sizes(query: Tensor, k_cache: Tensor) -> RowSizes:
    _, kv_heads, block_size, dim = k_cache.shape
    programs = cdiv(len(query) * kv_heads, num_multiprocessors(query.device))
    return RowSizes.choose(dim, query.shape[1] // kv_heads, block_size, programs)
