"""The kernel of a whole step on a CPU: the same source, compiled for an emulated machine."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from roseinfer.kernels.cuda.tensor_maps import tensor_maps
from roseinfer.kernels.cuda.whole_step import KERNEL, ROWS, source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kernels.kernel import CudaKernel

INCLUDES = Path(__file__).parents[1]
EMULATION = {
    "machine.cuh": "#include <whole_step/copies.h>",
    "warpgroup.cuh": "#include <warpgroups/warpgroup.h>",
    "wgmma.cuh": "",
}
"""The emulated machine's headers, in the folder ``INCLUDES``, by the names of those that they
replace."""
COMPILER = shutil.which("g++")
_ALIGNED = 64
"""Bytes: a kernel's arguments begin so, with the maps among them."""


class Sizes(Protocol):
    """The sizes that a kernel is compiled for."""

    def defines(self) -> dict[str, int]:
        """Return what the compiler is told."""


class EmulatedProgram:
    """Launches on one core, and returns when all is over."""

    def __init__(
        self,
        sizes: Sizes,
        folder: Path,
        *,
        kernel: CudaKernel = KERNEL,
        max_polls: int = 1 << 20,
        text: str | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """``text`` is what runs in place of the kernel's source, ``flags`` more of the compiler."""
        assert COMPILER
        code, library = folder / "step.cpp", folder / "step.so"
        own = text or source(EMULATION), kernel.layout_assertions()
        code.write_text("\n".join([*own, "#include <whole_step/grid.h>\n"]))
        defines = [f"-D{name}={value}" for name, value in sizes.defines().items()]
        defines.append(f"-DMAX_POLLS={max_polls}")
        always = ["-O2", "-w", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared"]
        command = [
            COMPILER,
            f"-I{INCLUDES}",
            *always,
            *flags,
            *defines,
            str(code),
            "-o",
            str(library),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self._library = ctypes.CDLL(str(library))
        self._library.launch.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 3]
        self.late = -1
        """A program that runs when all others are over."""
        self.seed = 0
        """What the turns of a launch are drawn from."""

    def encode(self, *given: object) -> None:
        assert self._library.encode(*given) == 0

    def tile(self, matrix: Tensor, chunk: int, row: int, group: int) -> Tensor:
        """Return a tile as it lies in shared memory."""
        maps = tensor_maps(self.encode, [(matrix, chunk)], ROWS)
        found = torch.full((8 * chunk,), float("nan"), dtype=torch.bfloat16)
        given = ctypes.c_void_p(found.data_ptr()), ctypes.c_void_p(maps.data_ptr())
        self._library.copy_one(*given, row, group)
        return found

    def fill_with(self, bits: int) -> None:
        """Have these bits in place of numbers beyond a matrix, which are zeros else."""
        self._library.fill_with(bits)

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        room = (ctypes.c_ubyte * (ctypes.sizeof(params) + _ALIGNED))()
        begin = ctypes.addressof(room) + -ctypes.addressof(room) % _ALIGNED
        ctypes.memmove(begin, ctypes.addressof(params), ctypes.sizeof(params))
        self._library.launch(begin, self.late, programs, self.seed)

    def shared_bytes(self) -> int:
        return int(self._library.shared_bytes())
