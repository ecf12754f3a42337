"""Compiling, loading and launching of CUDA C++ by NVRTC and the driver."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import tempfile
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# NVRTC, CUDA's compiler at run time, which comes with torch: no toolkit, no host compiler.


class CompilationError(RuntimeError):
    """Failure to compile or load CUDA C++ here."""


def compile_cubin(source: str, options: Sequence[str]) -> bytes:
    """Return the machine code of a source."""
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    ))  # fmt: skip
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), encoded):
            log = _compiler_output(program, "ProgramLog").decode(errors="replace")
            raise CompilationError(log.strip("\0\n "))
        return _compiler_output(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """Return the compiler's version; other versions generate other code."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _compiler_output(program: ctypes.c_void_p, name: str) -> bytes:
    """Return an output of the compiler by its name."""
    library = _library()
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{name}")(program, buffer))
    return buffer.raw


def _check(code: int) -> None:
    if code:
        library = _library()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompilationError(library.nvrtcGetErrorString(code).decode())


@cache
def _library() -> Any:
    """Load the compiler of torch's CUDA."""
    for name in _library_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompilationError("NVRTC is missing: it comes with torch's builds for CUDA")


def _library_names() -> Iterator[str]:
    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        return
    name = f"libnvrtc.so.{major}"
    yield name  # torch has loaded it, or the system can find it
    rooms = [Path(torch.__file__).parent / "lib"]
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        rooms += [room / "lib" for room in sorted(Path(place).iterdir())]
    yield from (str(room / name) for room in rooms if (room / name).is_file())


@cache
def driver() -> Any:
    """Return the driver's library, which comes with a GPU."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CompilationError("CUDA's driver is missing") from error


def check_driver_call(code: int) -> None:
    """Raise the driver's error for a call that failed."""
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(name))
        raise CompilationError(f"{(name.value or b'?').decode()} ({code})")


# Sources of kernels in CUDA C++: a file for each, and headers.


_SOURCES = files(__package__) / "source"
_INCLUDE = re.compile(r'#include "([\w.]+)"')


def read_source(name: str, headers: Mapping[str, str] | None = None) -> str:
    """Return a file of the folder ``source`` with its headers inlined, each once.

    ``headers`` are the texts of generated headers, and those that replace the folder's, by name.
    """
    headers = headers or {}
    return inline_headers((_SOURCES / name).read_text(), headers, name)


def inline_headers(text: str, headers: Mapping[str, str], name: str) -> str:
    """Return the text of a file with its headers inlined, each once, by ``read_source``'s rules.

    Lines keep the file and number by which a compiler's messages name them.
    """
    return "\n".join(_inlined_lines(text, headers, name, set())) + "\n"


def _inlined_lines(
    text: str, headers: Mapping[str, str], name: str, included: set[str]
) -> Iterator[str]:
    yield f'#line 1 "{name}"'
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            yield "" if line == "#pragma once" else line
            continue
        header = include[1]
        if header not in included:
            included.add(header)
            inner = headers.get(header)
            inner = (_SOURCES / header).read_text() if inner is None else inner
            yield from _inlined_lines(inner, headers, header, included)
        yield f'#line {number + 1} "{name}"'


# Compiled programs: cached on disk, loaded and launched by the driver.


_SHARED_BYTES, _SHARED_CARVEOUT = 8, 9
"""Attributes of a function in the driver: its maximum of dynamic shared memory, and the percentage
of a multiprocessor's memory that is shared. By default, the driver keeps the percentage of the
previous kernel if one program fits, whether or not more would fit with another."""


class Program(Protocol):
    """A program to launch: a GPU's, or a replacement."""

    def encode(self, *arguments: object) -> None:
        """Encode the map of a matrix (``tensor_maps.write_map``)."""

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        """Launch ``programs`` programs on torch's current stream."""


class LaunchAttribute(ctypes.Structure):
    """An attribute of a launch, ``CUlaunchAttribute``."""

    _fields_ = (("name", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """Configuration of a launch, ``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6
"""The driver's numbers of launch attributes."""


def cooperative_launch() -> LaunchAttribute:
    """Return the attribute that keeps all programs resident: a launch that does not fit fails."""
    return _attribute(_COOPERATIVE)


def pdl_launch() -> LaunchAttribute:
    """Return the attribute that starts the kernel while the previous one ends."""
    return _attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)


def _attribute(name: int) -> LaunchAttribute:
    return LaunchAttribute(name, 0, (ctypes.c_uint * 16)(1))


class GpuProgram:
    """One kernel with its launch configuration."""

    def __init__(
        self,
        cubin: bytes,
        name: str,
        block: int,
        shared: int,
        device: torch.device,
        *attributes: LaunchAttribute,
    ):
        """``block`` is the threads of a program, and ``shared`` its bytes of shared memory."""
        library = driver()
        own = device.index
        self._index = torch.cuda.current_device() if own is None else own
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._block, self._shared = block, shared
        self._attributes = (LaunchAttribute * len(attributes))(*attributes)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # torch's context is current from here on
            check_driver_call(library.cuModuleLoadData(ctypes.byref(self._module), cubin))
            check_driver_call(
                library.cuModuleGetFunction(
                    ctypes.byref(self._function), self._module, name.encode()
                )
            )
            check_driver_call(library.cuFuncSetAttribute(self._function, _SHARED_BYTES, shared))
            check_driver_call(library.cuFuncSetAttribute(self._function, _SHARED_CARVEOUT, 100))
            if not self._programs_per_multiprocessor():
                raise CompilationError("its programs do not fit on a multiprocessor")

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        """Launch ``programs`` programs on torch's current stream."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(params, programs)
            return
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        launch = ctypes.byref(self._launch_config(programs, stream))
        check_driver_call(driver().cuLaunchKernelEx(launch, self._function, pointers, None))

    @lru_cache(1 << 10)  # noqa: B019 - programs are kept for as long as there is a process
    def _launch_config(self, programs: int, stream: int) -> _LaunchConfig:
        return _LaunchConfig(
            grid=(programs, 1, 1),
            block=(self._block, 1, 1),
            shared=self._shared,
            stream=stream,
            attributes=ctypes.addressof(self._attributes),
            num_attributes=len(self._attributes),
        )

    @staticmethod
    def encode(*arguments: object) -> None:
        """Encode the map of a matrix by the driver (``tensor_maps.write_map``)."""
        check_driver_call(driver().cuTensorMapEncodeTiled(*arguments))

    def _programs_per_multiprocessor(self) -> int:
        """Return how many programs fit on a multiprocessor at a time."""
        programs = ctypes.c_int()
        check_driver_call(
            driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(programs), self._function, self._block, ctypes.c_size_t(self._shared)
            )
        )
        return programs.value


def compile_cached(source: str, defines: Mapping[str, int], device: torch.device) -> bytes:
    """Return the machine code for a GPU, from disk where it was compiled before."""
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    # Only explicit fused multiply-adds in the source are fused.
    # Instructions of this architecture alone, such as wgmma, need the `a`.
    options += [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", "--fmad=false"]
    text = "\n".join([source, *options, str(version())])
    kept = _cache_folder() / f"roseinfer-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        made = compile_cubin(source, options)
    _write_cache_file(kept, made)
    return made


def _write_cache_file(path: Path, made: bytes) -> None:
    """Write a file atomically; do nothing where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partly = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(made)
        os.replace(partly, path)  # another process may be writing it too
    except OSError:
        return


def _cache_folder() -> Path:
    """Return the folder where Triton caches compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


# Functions around wgmma, which are generated: an instruction names every register.


def wgmma_header(
    *, accumulate: Iterable[int] = (), overwrite: Iterable[int] = (), registers: Iterable[int] = ()
) -> dict[str, str]:
    """Return the header ``wgmma.cuh`` by its name, with functions for these numbers of columns."""
    functions = [
        *map(_wgmma_accumulate, accumulate),
        *map(_wgmma_overwrite, overwrite),
        *map(_wgmma_registers, registers),
    ]
    return {"wgmma.cuh": "\n".join(['#pragma once\n#include "warpgroup.cuh"', *functions])}


def _wgmma_accumulate(columns: int) -> str:
    """Return the function that accumulates products of tiles, the second of ``columns`` rows."""
    return f"""
template <>
DEV void wgmma_accumulate<{columns}>(float* d, TileDescriptor a, TileDescriptor b) {{
    asm volatile("{_wgmma_instruction(columns)}, "
                 "%{columns // 2}, %{columns // 2 + 1}, 1, 1, 1, 0, 0;"
                 : {_accumulator_operands(columns)} : "l"(a), "l"(b));
}}
"""


def _wgmma_overwrite(columns: int) -> str:
    """Return the function that multiplies two tiles and overwrites the sums."""
    a, b, zero = (f"%{columns // 2 + i}" for i in range(3))
    return f"""
template <>
DEV void wgmma_overwrite<{columns}>(float* d, TileDescriptor a, TileDescriptor b) {{
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, {zero}, 0;"
                 "{_wgmma_instruction(columns)}, {a}, {b}, add, 1, 1, 0, 0; }}"
                 : {_accumulator_operands(columns)} : "l"(a), "l"(b), "r"(0));
}}
"""


def _wgmma_registers(columns: int) -> str:
    """Return the function that multiplies threads' registers by a tile."""
    rows = ", ".join(f"%{columns // 2 + i}" for i in range(4))
    b, accumulate = (f"%{columns // 2 + i}" for i in (4, 5))
    return f"""
template <>
DEV void wgmma_registers<{columns}>(float* d, const u32* a, TileDescriptor b, bool accumulate) {{
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, {accumulate}, 0;"
                 "{_wgmma_instruction(columns)}, {{{rows}}}, {b}, add, 1, 1, 1; }}"
                 : {_accumulator_operands(columns)}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}}
"""


def _wgmma_instruction(columns: int) -> str:
    """Return the instruction with its accumulator registers."""
    numbers = ", ".join(f"%{i}" for i in range(columns // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{numbers}}}"


def _accumulator_operands(columns: int) -> str:
    return ", ".join(f'"+f"(d[{i}])' for i in range(columns // 2))
