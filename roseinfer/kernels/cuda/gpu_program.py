"""Compiled programs of CUDA's driver: kept on disk, loaded and launched."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from roseinfer.kernels.cuda import nvrtc
from roseinfer.kernels.cuda.driver import check, driver
from roseinfer.kernels.cuda.nvrtc import CannotCompile

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHARED_BYTES, _SHARED_SHARE = 8, 9
"""The driver's names for how much dynamic shared memory a function may be given, and for the share
of a multiprocessor's memory that is shared, in percent. Left to itself, the driver keeps the share
that the kernel before had if one program has room, whether or not more would with another."""


class Program(Protocol):
    """What is launched: a GPU's program, or one that stands in for it."""

    def encode(self, *given: object) -> None:
        """Encode the map of a matrix (``tensor_maps.write_map``)."""

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        """Launch so many programs on torch's current stream."""


class _Attribute(ctypes.Structure):
    """How a launch is special, ``CUlaunchAttribute``."""

    _fields_ = (("name", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """What is launched where, ``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


_TOGETHER, _EARLY = 2, 6
"""The driver's names of attributes."""


def together() -> _Attribute:
    """Have all programs on the GPU at a time: a launch that they have no room for fails."""
    return _attribute(_TOGETHER)


def early() -> _Attribute:
    """Have the kernel start while the one in front of it ends."""
    return _attribute(_EARLY)


def _attribute(name: int) -> _Attribute:
    return _Attribute(name, 0, (ctypes.c_uint * 16)(1))


class GpuProgram:
    """One kernel, and how it is launched every time."""

    def __init__(
        self,
        cubin: bytes,
        name: str,
        block: int,
        shared: int,
        device: torch.device,
        *attributes: _Attribute,
    ):
        """``block`` are the threads of a program, and ``shared`` the bytes that it is given."""
        library = driver()
        own = device.index
        self._index = torch.cuda.current_device() if own is None else own
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._block, self._shared = block, shared
        self._attributes = (_Attribute * len(attributes))(*attributes)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # torch's context is current from here on
            check(library.cuModuleLoadData(ctypes.byref(self._module), cubin))
            check(
                library.cuModuleGetFunction(
                    ctypes.byref(self._function), self._module, name.encode()
                )
            )
            check(library.cuFuncSetAttribute(self._function, _SHARED_BYTES, shared))
            check(library.cuFuncSetAttribute(self._function, _SHARED_SHARE, 100))
            if not self._room():
                raise CannotCompile("a multiprocessor has no room for one of its programs")

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        """Launch so many programs on torch's current stream."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(params, programs)
            return
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        launch = ctypes.byref(self._launch_of(programs, stream))
        check(driver().cuLaunchKernelEx(launch, self._function, pointers, None))

    @lru_cache(1 << 10)  # noqa: B019 - programs are kept for as long as there is a process
    def _launch_of(self, programs: int, stream: int) -> _Launch:
        return _Launch(
            grid=(programs, 1, 1),
            block=(self._block, 1, 1),
            shared=self._shared,
            stream=stream,
            attributes=ctypes.addressof(self._attributes),
            num_attributes=len(self._attributes),
        )

    @staticmethod
    def encode(*given: object) -> None:
        """Have the driver encode the map of a matrix (``tensor_maps.write_map``)."""
        check(driver().cuTensorMapEncodeTiled(*given))

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
    # Multiplications and additions are joined where the source says so, and nowhere else. What only
    # this architecture has, as products of warpgroups, needs the `a`.
    options += [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", "--fmad=false"]
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
