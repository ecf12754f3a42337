"""Launching of prefill attention by warpgroups, which has the bits of the chunk kernel."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    STRIP,
    TILE_TOKENS,
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
from roseinfer.kernels.cuda.toolchain import read_source, wgmma_header
from roseinfer.kernels.kernel import CudaKernel
from roseinfer.kernels.triton.prefill_attention import CHUNK_TRAFFIC
from roseinfer.kernels.triton.rope import angle_elements
from roseinfer.kernels.triton.softmax import score_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

# Compile-time sizes of the prefill kernel, and its source.


_ROWS = 64
"""Rows per warpgroup: tokens by the query heads of a KV head, rounded up to a power of two."""
_REGISTERS = {2: 240, 3: 160}
"""Registers of a computing thread, by the number of computing warpgroups; fetching ones leave it
these."""
_STAGES = 4
_ONES = 8
"""Columns of ones after the values."""


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """Compile-time sizes, which the source has as macros in capitals."""

    dim: int
    """Elements per head."""
    group: int
    """Query heads that share a KV head."""
    block_size: int

    def are_supported(self) -> bool:
        """Return True if the kernel can be compiled for them."""
        return are_sizes_supported(self.dim, self.group, self.block_size)

    @property
    def groups(self) -> int:
        """Warpgroups that compute, as many as the registers allow."""
        return 3 if self.dim == SIDE else 2

    @property
    def tokens(self) -> int:
        """Tokens per program."""
        return self.groups * _ROWS >> (self.group - 1).bit_length()

    @property
    def threads(self) -> int:
        """Threads of a program.

        One more warpgroup, which releases registers, has a thread that fetches.
        """
        return (self.groups + 1) * 128

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: queries of two items, two rings, and barriers."""
        strips = self.dim // SIDE
        of_rings = _STAGES * (strips + strips + 1)
        return (2 * self.groups * strips + of_rings) * STRIP + 1024

    def defines(self) -> dict[str, int]:
        derived = {
            "groups": self.groups,
            "registers": _REGISTERS[self.groups],
            "stages": _STAGES,
            "shared_bytes": self.shared_bytes,
        }
        named = asdict(self) | derived
        return {name.upper(): value for name, value in named.items()}

    def source(self, headers: Mapping[str, str] | None = None) -> str:
        """Return the kernel's source; ``headers`` replace its own by name."""
        generated = wgmma_header(
            accumulate=(TILE_TOKENS,), overwrite=(TILE_TOKENS,), registers=(self.dim + _ONES,)
        )
        return read_source("prefill_attention.cu", generated | dict(headers or {}))


_MIN_TILES = 6
"""Smallest context in tiles. With fewer the kernel was slower than Triton's on an H100, end to end.
"""


_POINTERS = (
    "query", "k_cache", "v_cache", "cosines", "sines", "out",
    "tables", "sequences", "rows", "counts", "positions",
)  # fmt: skip
_STRIDES = (
    "query_token", "query_head", "out_token", "out_head", "block_rows", "head_rows", "table_width",
)  # fmt: skip
KERNEL = CudaKernel(
    "attend_prompts",
    {
        **dict.fromkeys(("keys", "values"), TensorMap),
        **dict.fromkeys(_POINTERS, ctypes.c_void_p),
        **dict.fromkeys(_STRIDES, ctypes.c_longlong),
        **dict.fromkeys(("tiles", "kv_heads", "programs"), ctypes.c_int),
        "scale": ctypes.c_float,
    },
    {**CHUNK_TRAFFIC, "cosines": angle_elements, "sines": angle_elements},
    fallback="prefill attention runs in Triton's kernel",
)


def prefill_tile_tokens(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    traits: LayerTraits,
    *,
    most: int,
    longest: int,
) -> int:
    """Return the tokens of a tile where the kernel is the fastest, and compile it then; else 0.

    A sequence has at most ``most`` new tokens, and at most ``longest`` in all.
    """
    sizes = _sizes(query, k_cache)
    tokens = sizes.tokens
    fit = (
        has_plain_scores(traits)
        and most > tokens // 2
        and longest >= _MIN_TILES * tokens
        and supports_wgmma(query.device, query.dtype)
        and k_cache.dtype is query.dtype
        and sizes.are_supported()
        and are_heads_aligned(query)
        and are_caches_tma_aligned(k_cache, v_cache)
    )
    return tokens if fit and KERNEL.load(sizes, query.device) is not None else 0


def attend_prompts(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    tiles: tuple[Tensor, ...],
    traits: LayerTraits,
    rotation: RotaryEmbedding | None = None,
    *,
    program: Program | None = None,
    programs: int | None = None,
) -> Tensor:
    """Compute the same as ``paged_attention_chunks``, with larger tiles.

    A tile has as many tokens as a program takes. With a rotation, for which ``can_rotate_queries``
    must be true, queries are still to be rotated. ``program`` replaces the device's kernel;
    ``programs`` of it are launched.
    """
    sizes = _sizes(query, k_cache)
    program = program or KERNEL.load(sizes, query.device)
    assert program is not None
    out = query.new_empty(query.shape)
    kv_heads, (block_rows, head_rows) = k_cache.shape[1], cache_row_strides(k_cache)
    sequences, rows, counts, positions = tiles
    items = sequences.shape[0] * kv_heads
    programs = min(items, programs or num_multiprocessors(query.device))
    KERNEL.launch(
        program, programs, keys=cache_tiles(k_cache), values=cache_tiles(v_cache),
        query=query, k_cache=k_cache, v_cache=v_cache, out=out, tables=tables,
        sequences=sequences, rows=rows, counts=counts, positions=positions, **angles(rotation),
        query_token=query.stride(0), query_head=query.stride(1),
        out_token=out.stride(0), out_head=out.stride(1), block_rows=block_rows, head_rows=head_rows,
        table_width=tables.stride(0), tiles=sequences.shape[0], kv_heads=kv_heads,
        programs=programs, scale=score_arguments(traits, query)["scale"],
    )  # fmt: skip
    return out


def can_rotate_queries(query: Tensor, rotation: RotaryEmbedding) -> bool:
    """Return True if ``attend_prompts`` can rotate queries: whole heads, which are not normed."""
    tables = rotation.cosines, rotation.sines
    return rotation.query_norm_weight is None and all(
        each.dtype is query.dtype and each.stride() == (query.shape[2], 1) for each in tables
    )


def _sizes(query: Tensor, k_cache: Tensor) -> PromptSizes:
    _, kv_heads, block_size, dim = k_cache.shape
    return PromptSizes(dim, query.shape[1] // kv_heads, block_size)
