"""Compiled programs of CUDA's driver: kept on disk, loaded and launched."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.persistent import nvrtc
from roseinfer.kernels.persistent.driver import check, driver
from roseinfer.kernels.persistent.nvrtc import CannotCompile
from roseinfer.kernels.persistent.tensor_maps import tensor_maps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_SHARED_BYTES = 8
"""The driver's name for how much dynamic shared memory a function may be given."""


class GpuProgram:
    """One kernel, all of whose programs are on the GPU at a time."""

    def __init__(
        self, cubin: bytes, name: str, grid: int, block: int, shared: int, device: torch.device
    ):
        """``block`` are the threads of a program, and ``shared`` the bytes that it is given."""
        library = driver()
        self._grid, self._block, self._shared, self._device = grid, block, shared, device
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # torch's context is current from here on
            check(library.cuModuleLoadData(ctypes.byref(self._module), cubin))
            check(
                library.cuModuleGetFunction(
                    ctypes.byref(self._function), self._module, name.encode()
                )
            )
            check(library.cuFuncSetAttribute(self._function, _SHARED_BYTES, self._shared))
            if not self._room():
                raise CannotCompile("a multiprocessor has no room for one of its programs")

    def maps(self, matrices: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return the maps of matrices, with so many inputs in a tile of each."""
        encode = driver().cuTensorMapEncodeTiled
        return tensor_maps(lambda *given: check(encode(*given)), matrices)

    def launch(self, params: ctypes.Structure) -> None:
        """Launch on torch's current stream. A launch that not all programs have room for fails."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            check(driver().cuLaunchCooperativeKernel(
                self._function, self._grid, 1, 1, self._block, 1, 1, self._shared, stream, pointers
            ))  # fmt: skip

    def _room(self) -> int:
        """Return how many programs a multiprocessor holds at a time."""
        held = ctypes.c_int()
        check(
            driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(held), self._function, self._block, ctypes.c_size_t(self._shared)
            )
        )
        return held.value


def compiled(source: str, defines: Mapping[str, int], device: torch.device) -> bytes:
    """Return the machine code for a GPU, from disk where it was compiled before."""
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    # Multiplications and additions are joined where the source says so, and nowhere else.
    options += [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", "--fmad=false"]
    text = "\n".join([source, *options, str(nvrtc.version())])
    kept = _folder() / f"roseinfer-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        made = nvrtc.compile_cubin(source, options)
    _keep(kept, made)
    return made


def _keep(path: Path, made: bytes) -> None:
    """Write a file as a whole, or not at all where there is no place for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partly = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(made)
        os.replace(partly, path)  # another process may be writing it too
    except OSError:
        return


def _folder() -> Path:
    """Return where Triton keeps what it has compiled."""
    from triton import knobs

    return Path(knobs.cache.dir)
