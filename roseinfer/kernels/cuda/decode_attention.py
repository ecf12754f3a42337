"""Launching the attention of rows that decode, which has the bits of Triton's kernel."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    STRIP,
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
from roseinfer.kernels.cuda.toolchain import loaded
from roseinfer.kernels.runtime import num_tiles
from roseinfer.kernels.traffic import announced
from roseinfer.kernels.triton.decode_attention import rows_moved
from roseinfer.kernels.triton.softmax import score_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program
    from roseinfer.layer_traits import LayerTraits, Rotation

# What the kernel that attends from single rows is compiled for, and its source for that.


_MULTIPROCESSOR_BYTES = 227 << 10
"""Shared memory of a multiprocessor."""
_REST = 2 << 10
"""Barriers and scores of the new token, and what is left of the last 1,024 bytes."""
_PROGRAM_BYTES = 1 << 10
"""Of which every program takes so many besides its own."""
_WARPS_AND_PLACES = ((4, 4), (4, 2), (3, 2), (2, 2), (1, 3))
"""Those for few programs first."""
_IN_TURN = 3
"""Which of them is for programs that come one after the other."""
_FILES = ("row_tiles", "row_attending")


@dataclass(frozen=True, slots=True)
class RowSizes:
    """What the compiler is told, under these names in capitals."""

    dim: int
    """Numbers of a head."""
    group: int
    """Query heads that share a KV head."""
    block_size: int
    warps: int
    places: int
    """Of a warp, for keys or values of a tile."""

    @classmethod
    def chosen(cls, dim: int, group: int, block_size: int, programs: int) -> RowSizes:
        """Return the sizes that are the fastest for so many programs on a multiprocessor.

        All programs are there at once, with as many places as they have room for. If they have
        none, they come one after the other.
        """
        own = [cls(dim, group, block_size, *each) for each in _WARPS_AND_PLACES]
        room = _MULTIPROCESSOR_BYTES // programs - _PROGRAM_BYTES
        return next((each for each in own if each.shared_bytes <= room), own[_IN_TURN])

    def fit(self) -> bool:
        """Tell if the kernel can be compiled for them."""
        return sizes_fit(self.dim, self.group, self.block_size)

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a program: tiles, what is seen of parts, the new token, barriers."""
        of_warp = self.places * self.dim // SIDE * STRIP + self.group * (self.dim + 6) * 4
        heads = (16 if self.group > 8 else 8) + 2
        return self.warps * of_warp + heads * (self.dim + 8) * 2 + _REST

    def defines(self) -> dict[str, int]:
        named = {**asdict(self), "shared_bytes": self.shared_bytes}
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, machine: bool = True) -> str:
        """Return the kernel's source; without the machine's part, another must stand in for it."""
        own = toolchain.machine("machine", "warpgroup") if machine else []
        parts = [toolchain.part(__package__, name) for name in _FILES]
        return "\n".join([*own, *toolchain.shared(), *parts])


KERNEL = "attend_rows"
"""Its name in the source."""
_FEWEST_PROGRAMS = 24
"""They are about as fast as several for each context, which Triton's kernel has, even if contexts
are long. Fewer are faster only if contexts are short, which a graph cannot know."""
_PLAIN = {"WINDOW": 0, "SINKING": False, "SLOPED": False, "APPENDS": True, "SPLITS": 1}


class RowParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source, which ends at a multiple of 64 bytes."""

    _fields_ = (
        ("keys", Map),
        ("values", Map),
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


def attends_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    traits: LayerTraits,
) -> bool:
    """Tell if the kernel is the fastest here, and compile it then."""
    fit = (
        is_plain(traits)
        and len(query) * k_cache.shape[1] >= _FEWEST_PROGRAMS
        and has_warpgroups(query.device, query.dtype)
        and k_cache.dtype is query.dtype
        and all(map(heads_lie_well, (query, key, value)))
        and caches_lie_well(k_cache, v_cache)
    )
    if not fit:
        return False
    sizes = _sizes(query, k_cache)
    return sizes.fit() and program_of(sizes, query.device) is not None


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    traits: LayerTraits,
    rotation: Rotation | None = None,
    *,
    program: Program | None = None,
    sizes: RowSizes | None = None,
) -> Tensor:
    """Do what ``append_and_attend`` does.

    On a GPU what is stored of earlier tokens may be read before the kernel in front has ended, as
    ``lengths`` and ``tables`` may: it must not be what writes them. ``program`` is one that is not
    that of the device, for ``sizes``.
    """
    sizes = sizes or _sizes(query, k_cache)
    program = program or program_of(sizes, query.device)
    assert program is not None
    out = query.new_empty(query.shape)
    kv_heads = k_cache.shape[1]
    angles = (rotation.cosines, rotation.sines) if rotation else ()
    heads = query, key, value, out
    params = RowParams(
        map_of_cache(program, k_cache), map_of_cache(program, v_cache),
        *(each.data_ptr() for each in (query, key, value, k_cache, v_cache)),
        *([each.data_ptr() for each in angles] or (None, None)),
        *(each.data_ptr() for each in (out, tables, lengths)),
        *(stride for each in heads for stride in each.stride()[:2]),
        *rows_between(k_cache), tables.stride(0), lengths.stride(0),
        kv_heads, score_arguments(traits, query).scale,
    )  # fmt: skip
    names = "query", "key", "value", "out", "k_cache", "v_cache", "tables", "lengths"
    given = dict(zip(names, (*heads, k_cache, v_cache, tables, lengths), strict=True))
    given |= dict(zip(("cosines", "sines"), angles, strict=False))
    with announced(KERNEL, partial(_moved, given, sizes)):
        program.launch(params, len(query) * kv_heads)
    return out


def _moved(
    given: Mapping[str, Tensor], sizes: RowSizes
) -> list[tuple[Tensor, int | Callable[[], int]]]:
    told = {
        "D": sizes.dim,
        "BLOCK": sizes.block_size,
        "GROUP": sizes.group,
        "Q_HEADS": given["query"].shape[1],
        "TURN": sizes.dim if "cosines" in given else 0,
    }
    return [
        (given[name], amount) for name, amount in rows_moved({**given, **told, **_PLAIN}).items()
    ]


def _sizes(query: Tensor, k_cache: Tensor) -> RowSizes:
    _, kv_heads, block_size, dim = k_cache.shape
    programs = num_tiles(len(query) * kv_heads, multiprocessors(query.device))
    return RowSizes.chosen(dim, query.shape[1] // kv_heads, block_size, programs)


def program_of(sizes: RowSizes, device: torch.device) -> GpuProgram | None:
    """Return the kernel, or None where it cannot be compiled."""
    return loaded(sizes, KERNEL, device, "rows are attended from in Triton's kernel")
