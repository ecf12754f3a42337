"""Launching of decode attention in CUDA, which has the bits of Triton's kernel."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    STRIP,
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
from roseinfer.kernels.cuda.toolchain import compile_and_load
from roseinfer.kernels.runtime import cdiv
from roseinfer.kernels.traffic import notify_launch_hooks
from roseinfer.kernels.triton.decode_attention import rows_traffic
from roseinfer.kernels.triton.softmax import score_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

# Compile-time sizes of the decode kernel, and its source.


_MULTIPROCESSOR_BYTES = 227 << 10
"""Shared memory of a multiprocessor."""
_REST = 2 << 10
"""Bytes for barriers and scores of the new token, and for the rest of the last 1,024 bytes."""
_RESERVED_BYTES = 1 << 10
"""Bytes of a multiprocessor's shared memory that CUDA reserves for each program."""
_WARPS_AND_STAGES = ((4, 4), (4, 2), (3, 2), (2, 2), (1, 3))
"""Warps per program and places per warp; choices for few programs first."""
_SEQUENTIAL_CHOICE = 3
"""Index of the choice for programs that run one after the other."""
_SOURCE_PARTS = ("row_tiles", "row_attending")


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Compile-time sizes, which the source has as macros in capitals."""

    dim: int
    """Elements per head."""
    group: int
    """Query heads that share a KV head."""
    block_size: int
    warps: int
    places: int
    """Places of a warp, each for keys or values of a tile."""

    @classmethod
    def choose(cls, dim: int, group: int, block_size: int, programs: int) -> RowSizes:
        """Return the fastest sizes for ``programs`` programs on a multiprocessor.

        All programs are resident at once, with as many places as fit. If none fit, the programs run
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
        of_warp = self.places * self.dim // SIDE * STRIP + self.group * (self.dim + 6) * 4
        heads = (16 if self.group > 8 else 8) + 2
        return self.warps * of_warp + heads * (self.dim + 8) * 2 + _REST

    def defines(self) -> dict[str, int]:
        named = {**asdict(self), "shared_bytes": self.shared_bytes}
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, with_machine: bool = True) -> str:
        """Return the kernel's source; without the machine's sources, others must replace them."""
        machine = toolchain.machine_sources("machine", "warpgroup") if with_machine else []
        parts = [toolchain.source_part(__package__, name) for name in _SOURCE_PARTS]
        return "\n".join([*machine, *toolchain.shared_sources(), *parts])


KERNEL = "attend_rows"
"""The kernel's name in the source."""
_MIN_PROGRAMS = 24
"""Smallest number of programs. They are about as fast as several for each context, which Triton's
kernel has, even if contexts are long. Fewer are faster only if contexts are short, which a graph
cannot know."""
_PLAIN = {"WINDOW": 0, "SINKING": False, "SLOPED": False, "APPENDS": True, "SPLITS": 1}


class RowParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source; its size is a multiple of 64 bytes."""

    _fields_ = (
        ("keys", TensorMap),
        ("values", TensorMap),
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "key", "value", "k_cache", "v_cache", "cosines", "sines", "out")
        ),
        *((name, ctypes.c_void_p) for name in ("tables", "lengths")),
        *(
            (f"{name}_{of}", ctypes.c_longlong)
            for name in ("query", "key", "value", "out")
            for of in ("token", "head")
        ),
        *((name, ctypes.c_longlong) for name in ("block_rows", "head_rows")),
        *((name, ctypes.c_longlong) for name in ("table_width", "length_pitch")),
        ("kv_heads", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_ubyte * 8),
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
    return sizes.are_supported() and program_of(sizes, query.device) is not None


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
    program = program or program_of(sizes, query.device)
    assert program is not None
    out = query.new_empty(query.shape)
    kv_heads = k_cache.shape[1]
    angles = (rotation.cosines, rotation.sines) if rotation else ()
    heads = query, key, value, out
    params = RowParams(
        cache_map(program, k_cache), cache_map(program, v_cache),
        *(each.data_ptr() for each in (query, key, value, k_cache, v_cache)),
        *([each.data_ptr() for each in angles] or (None, None)),
        *(each.data_ptr() for each in (out, tables, lengths)),
        *(stride for each in heads for stride in each.stride()[:2]),
        *cache_row_strides(k_cache), tables.stride(0), lengths.stride(0),
        kv_heads, score_arguments(traits, query).scale,
    )  # fmt: skip
    names = "query", "key", "value", "out", "k_cache", "v_cache", "tables", "lengths"
    tensors = dict(zip(names, (*heads, k_cache, v_cache, tables, lengths), strict=True))
    tensors |= dict(zip(("cosines", "sines"), angles, strict=False))
    with notify_launch_hooks(KERNEL, partial(_traffic, tensors, sizes)):
        program.launch(params, len(query) * kv_heads)
    return out


def _traffic(
    tensors: Mapping[str, Tensor], sizes: RowSizes
) -> list[tuple[Tensor, int | Callable[[], int]]]:
    constants = {
        "D": sizes.dim,
        "BLOCK": sizes.block_size,
        "GROUP": sizes.group,
        "Q_HEADS": tensors["query"].shape[1],
        "TURN": sizes.dim if "cosines" in tensors else 0,
    }
    return [
        (tensors[name], amount)
        for name, amount in rows_traffic({**tensors, **constants, **_PLAIN}).items()
    ]


def _sizes(query: Tensor, k_cache: Tensor) -> RowSizes:
    _, kv_heads, block_size, dim = k_cache.shape
    programs = cdiv(len(query) * kv_heads, num_multiprocessors(query.device))
    return RowSizes.choose(dim, query.shape[1] // kv_heads, block_size, programs)


def program_of(sizes: RowSizes, device: torch.device) -> GpuProgram | None:
    """Return the kernel, or None where it cannot be compiled."""
    return compile_and_load(sizes, KERNEL, device, "decode attention runs in Triton's kernel")
