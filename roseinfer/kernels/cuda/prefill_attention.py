"""Launching of prefill attention by warpgroups, which has the bits of the chunk kernel."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    STRIP,
    TILE_TOKENS,
    TensorMap,
    are_caches_tma_aligned,
    are_heads_aligned,
    are_sizes_supported,
    cache_map,
    cache_row_strides,
    has_plain_scores,
    num_multiprocessors,
    supports_wgmma,
)
from roseinfer.kernels.cuda.toolchain import (
    compile_and_load,
    wgmma_accumulate_source,
    wgmma_overwrite_source,
    wgmma_registers_source,
)
from roseinfer.kernels.traffic import notify_launch_hooks, num_bytes
from roseinfer.kernels.triton.prefill_attention import chunks_traffic
from roseinfer.kernels.triton.softmax import score_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

# Compile-time sizes of the prefill kernel, and its source.


_ROWS = 64
"""Rows per warpgroup: tokens by the query heads of a KV head, rounded up to a power of two."""
_SOURCE_PARTS = ("prompt_items", "prompt_fetching", "prompt_attending", "prompts")
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
        """Threads of a program: one more warpgroup, which releases registers, has a thread that
        fetches."""
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

    def source(self, *, with_machine: bool = True) -> str:
        """Return the kernel's source; without the machine's sources, others must replace them."""
        machine = toolchain.machine_sources("machine", "warpgroup") if with_machine else []
        if with_machine:
            machine += [wgmma_overwrite_source(TILE_TOKENS), wgmma_accumulate_source(TILE_TOKENS)]
            machine.append(wgmma_registers_source(self.dim + _ONES))
        parts = [toolchain.source_part(__package__, name) for name in _SOURCE_PARTS]
        return "\n".join([*machine, *toolchain.shared_sources(), *parts])


KERNEL = "attend_prompts"
"""The kernel's name in the source."""
_MIN_TILES = 6
"""Smallest context in tiles. With fewer the kernel was slower than Triton's on an H100, end to end.
"""
_PLAIN = {"WINDOW": 0, "SINKING": False, "SLOPED": False}


class PromptParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source; its size is a multiple of 64 bytes."""

    _fields_ = (
        ("keys", TensorMap),
        ("values", TensorMap),
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "k_cache", "v_cache", "cosines", "sines", "out")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("tables", "sequences", "rows", "counts", "positions")
        ),
        *(
            (name, ctypes.c_longlong)
            for name in ("query_token", "query_head", "out_token", "out_head")
        ),
        *((name, ctypes.c_longlong) for name in ("block_rows", "head_rows", "table_width")),
        *((name, ctypes.c_int) for name in ("tiles", "kv_heads", "programs")),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_ubyte * 32),
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
    return tokens if fit and program_of(sizes, query.device) is not None else 0


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
    """Compute the same as ``paged_attention_chunks``, with tiles of as many tokens as a program
    takes.

    With a rotation, for which ``can_rotate_queries`` must be true, queries are still to be rotated.
    ``program`` replaces the device's kernel; ``programs`` of it are launched.
    """
    sizes = _sizes(query, k_cache)
    program = program or program_of(sizes, query.device)
    assert program is not None
    out = query.new_empty(query.shape)
    kv_heads, (block_rows, head_rows) = k_cache.shape[1], cache_row_strides(k_cache)
    items = len(tiles[0]) * kv_heads
    programs = min(items, programs or num_multiprocessors(query.device))
    angles = (rotation.cosines, rotation.sines) if rotation else ()
    params = PromptParams(
        cache_map(program, k_cache), cache_map(program, v_cache),
        *(each.data_ptr() for each in (query, k_cache, v_cache)),
        *([each.data_ptr() for each in angles] or (None, None)),
        *(each.data_ptr() for each in (out, tables, *tiles)),
        *query.stride()[:2], *out.stride()[:2], block_rows, head_rows, tables.stride(0),
        len(tiles[0]), kv_heads, programs, score_arguments(traits, query).scale,
    )  # fmt: skip
    names = "query", "k_cache", "v_cache", "out", "tables", "sequences", "rows", "counts"
    tensors = dict(
        zip((*names, "positions"), (query, k_cache, v_cache, out, tables, *tiles), strict=True)
    )
    with notify_launch_hooks(KERNEL, partial(_traffic, tensors, sizes, angles)):
        program.launch(params, programs)
    return out


def can_rotate_queries(query: Tensor, rotation: RotaryEmbedding) -> bool:
    """Return True if ``attend_prompts`` can rotate queries: whole heads, which are not normed."""
    tables = rotation.cosines, rotation.sines
    return rotation.query_norm_weight is None and all(
        each.dtype is query.dtype and each.stride() == (query.shape[2], 1) for each in tables
    )


def _traffic(
    tensors: Mapping[str, Tensor], sizes: PromptSizes, angles: tuple[Tensor, ...]
) -> list[tuple[Tensor, int | Callable[[], int]]]:
    more = {"D": sizes.dim, "BLOCK": sizes.block_size, **_PLAIN}
    traffic = [
        (tensors[name], amount) for name, amount in chunks_traffic({**tensors, **more}).items()
    ]
    return traffic + [(each, num_bytes(each, len(tensors["query"]) * sizes.dim)) for each in angles]


def _sizes(query: Tensor, k_cache: Tensor) -> PromptSizes:
    _, kv_heads, block_size, dim = k_cache.shape
    return PromptSizes(dim, query.shape[1] // kv_heads, block_size)


def program_of(sizes: PromptSizes, device: torch.device) -> GpuProgram | None:
    """Return the kernel, or None where it cannot be compiled."""
    return compile_and_load(sizes, KERNEL, device, "prefill attention runs in Triton's kernel")
