"""Launching the attention of prompts by warpgroups, which has the bits of the chunk kernel."""

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
    Map,
    caches_lie_well,
    has_warpgroups,
    heads_lie_well,
    is_plain,
    map_of_cache,
    multiprocessors,
    rows_between,
    sizes_fit,
)
from roseinfer.kernels.cuda.toolchain import add_product, add_product_of_held, loaded, product
from roseinfer.kernels.traffic import announced, taken
from roseinfer.kernels.triton.prefill_attention import chunks_moved
from roseinfer.kernels.triton.softmax import score_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program
    from roseinfer.layer_traits import LayerTraits, Rotation

# What the kernel that attends for prompts is compiled for, and its source for that.


_ROWS = 64
"""Of a warpgroup: tokens by the query heads that share a KV head, rounded up to a power of two."""
_FILES = ("prompt_items", "prompt_fetching", "prompt_attending", "prompts")
_REGISTERS = {2: 240, 3: 160}
"""Of a thread that computes, by how many warpgroups do. Those that fetch leave it so many."""
_STAGES = 4
_ONES = 8
"""Columns of ones behind the values."""


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """What the compiler is told, under these names in capitals."""

    dim: int
    """Numbers of a head."""
    group: int
    """Query heads that share a KV head."""
    block_size: int

    def fit(self) -> bool:
        """Tell if the kernel can be compiled for them."""
        return sizes_fit(self.dim, self.group, self.block_size)

    @property
    def groups(self) -> int:
        """Count the warpgroups that compute: as many as have room for what their threads hold."""
        return 3 if self.dim == SIDE else 2

    @property
    def tokens(self) -> int:
        """Return how many tokens a program takes."""
        return self.groups * _ROWS >> (self.group - 1).bit_length()

    @property
    def threads(self) -> int:
        """One more warpgroup, which gives registers away, has a thread that fetches."""
        return (self.groups + 1) * 128

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a program: queries of two items, two rings, and barriers."""
        strips = self.dim // SIDE
        of_rings = _STAGES * (strips + strips + 1)
        return (2 * self.groups * strips + of_rings) * STRIP + 1024

    def defines(self) -> dict[str, int]:
        told = {
            "groups": self.groups,
            "registers": _REGISTERS[self.groups],
            "stages": _STAGES,
            "shared_bytes": self.shared_bytes,
        }
        named = asdict(self) | told
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, machine: bool = True) -> str:
        """Return the kernel's source; without the machine's part, another must stand in for it."""
        own = toolchain.machine("machine", "warpgroup") if machine else []
        if machine:
            own += [product(TILE_TOKENS), add_product(TILE_TOKENS)]
            own.append(add_product_of_held(self.dim + _ONES))
        parts = [toolchain.part(__package__, name) for name in _FILES]
        return "\n".join([*own, *toolchain.shared(), *parts])


KERNEL = "attend_prompts"
"""Its name in the source."""
_FEWEST_TILES = 6
"""Of a context. With fewer the kernel was slower than Triton's on an H100, end to end."""
_PLAIN = {"WINDOW": 0, "SINKING": False, "SLOPED": False}


class PromptParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source, which ends at a multiple of 64 bytes."""

    _fields_ = (
        ("keys", Map),
        ("values", Map),
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


def prompt_tile(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    traits: LayerTraits,
    *,
    most: int,
    longest: int,
) -> int:
    """Return how many tokens a tile has where the kernel is the fastest, and compile it then.

    It is 0 where another attends. A sequence has ``most`` new tokens or fewer, and ``longest`` or
    fewer in all.
    """
    sizes = _sizes(query, k_cache)
    tokens = sizes.tokens
    fit = (
        is_plain(traits)
        and most > tokens // 2
        and longest >= _FEWEST_TILES * tokens
        and has_warpgroups(query.device, query.dtype)
        and k_cache.dtype is query.dtype
        and sizes.fit()
        and heads_lie_well(query)
        and caches_lie_well(k_cache, v_cache)
    )
    return tokens if fit and program_of(sizes, query.device) is not None else 0


def attend_prompts(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    tiles: tuple[Tensor, ...],
    traits: LayerTraits,
    rotation: Rotation | None = None,
    *,
    program: Program | None = None,
    programs: int | None = None,
) -> Tensor:
    """Compute what ``paged_attention_chunks`` does, in tiles of as many tokens as a program takes.

    With a rotation, which must be one that ``rotates_queries``, they are yet to be rotated.
    ``program`` is one that is not that of the device, and ``programs`` how many of it are launched.
    """
    sizes = _sizes(query, k_cache)
    program = program or program_of(sizes, query.device)
    assert program is not None
    out = query.new_empty(query.shape)
    kv_heads, (block_rows, head_rows) = k_cache.shape[1], rows_between(k_cache)
    items = len(tiles[0]) * kv_heads
    programs = min(items, programs or multiprocessors(query.device))
    angles = (rotation.cosines, rotation.sines) if rotation else ()
    params = PromptParams(
        map_of_cache(program, k_cache), map_of_cache(program, v_cache),
        *(each.data_ptr() for each in (query, k_cache, v_cache)),
        *([each.data_ptr() for each in angles] or (None, None)),
        *(each.data_ptr() for each in (out, tables, *tiles)),
        *query.stride()[:2], *out.stride()[:2], block_rows, head_rows, tables.stride(0),
        len(tiles[0]), kv_heads, programs, score_arguments(traits, query).scale,
    )  # fmt: skip
    names = "query", "k_cache", "v_cache", "out", "tables", "sequences", "rows", "counts"
    given = dict(
        zip((*names, "positions"), (query, k_cache, v_cache, out, tables, *tiles), strict=True)
    )
    with announced(KERNEL, partial(_moved, given, sizes, angles)):
        program.launch(params, programs)
    return out


def rotates_queries(query: Tensor, rotation: Rotation) -> bool:
    """Tell if ``attend_prompts`` can rotate queries by this: whole heads, which are not normed."""
    tables = rotation.cosines, rotation.sines
    return rotation.query_gain is None and all(
        each.dtype is query.dtype and each.stride() == (query.shape[2], 1) for each in tables
    )


def _moved(
    given: Mapping[str, Tensor], sizes: PromptSizes, angles: tuple[Tensor, ...]
) -> list[tuple[Tensor, int | Callable[[], int]]]:
    more = {"D": sizes.dim, "BLOCK": sizes.block_size, **_PLAIN}
    moved = [(given[name], amount) for name, amount in chunks_moved({**given, **more}).items()]
    return moved + [(each, taken(each, len(given["query"]) * sizes.dim)) for each in angles]


def _sizes(query: Tensor, k_cache: Tensor) -> PromptSizes:
    _, kv_heads, block_size, dim = k_cache.shape
    return PromptSizes(dim, query.shape[1] // kv_heads, block_size)


def program_of(sizes: PromptSizes, device: torch.device) -> GpuProgram | None:
    """Return the kernel, or None where it cannot be compiled."""
    return loaded(sizes, KERNEL, device, "prompts are attended to in Triton's kernel")
