"""CUDA's driver, which comes with a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import tempfile
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# CUDA's compiler at run time, which comes with torch: it needs no toolkit and no host compiler.


class CannotCompile(RuntimeError):
    """CUDA C++ cannot be compiled or loaded here."""


def compile_cubin(source: str, options: Sequence[str]) -> bytes:
    """Return the machine code of a source."""
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"step.cu", 0, None, None
    ))  # fmt: skip
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _text(program, "ProgramLog").decode(errors="replace")
            raise CannotCompile(log.strip("\0\n "))
        return _text(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """Return the compiler's version; another makes other code."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _text(program: ctypes.c_void_p, name: str) -> bytes:
    """Return what the compiler has under a name."""
    library = _library()
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{name}")(program, found))
    return found.raw


def _check(code: int) -> None:
    if code:
        library = _library()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CannotCompile(library.nvrtcGetErrorString(code).decode())


@cache
def _library() -> Any:
    """Load the compiler of torch's CUDA."""
    for name in _names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CannotCompile("NVRTC is not there: it comes with torch's builds for CUDA")


def _names() -> Iterator[str]:
    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        return
    name = f"libnvrtc.so.{major}"
    yield name  # torch has loaded it, or the system knows where it is
    rooms = [Path(torch.__file__).parent / "lib"]
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or () if found else ():
        rooms += [room / "lib" for room in sorted(Path(place).iterdir())]
    yield from (str(room / name) for room in rooms if (room / name).is_file())


@cache
def driver() -> Any:
    """Return the driver's library."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotCompile("CUDA's driver is not there") from error


def check(code: int) -> None:
    """Raise what the driver says of a call that failed."""
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(name))
        raise CannotCompile(f"{(name.value or b'?').decode()} ({code})")


# The text of kernels in CUDA C++, which is put together of parts.


@cache
def part(package: str, name: str) -> str:
    """Return a part of a source, a file in the folder ``source`` of a package."""
    return (files(package) / "source" / f"{name}.cu").read_text()


def machine(*names: str) -> list[str]:
    """Return the parts that say what the machine does; a CPU has others in their place."""
    return [part(__package__, name) for name in names]


def shared() -> list[str]:
    """Return the parts that all kernels have, on any machine."""
    return [part(__package__, name) for name in ("arithmetic", "norm", "barriers", "context_parts")]


# Compiled programs of CUDA's driver: kept on disk, loaded and launched.


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
    text = "\n".join([source, *options, str(version())])
    kept = _folder() / f"roseinfer-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        made = compile_cubin(source, options)
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


# Kernels of warpgroups, each compiled and loaded when it is first wanted.


_LOG = logging.getLogger("roseinfer")


class Sizes(Protocol):
    """What a kernel is compiled for."""

    @property
    def threads(self) -> int:
        """Count the threads of a program."""

    @property
    def shared_bytes(self) -> int:
        """Count the bytes of shared memory that it is given."""

    def defines(self) -> dict[str, int]:
        """Return what the compiler is told."""

    def source(self) -> str:
        """Return the kernel's source."""


@cache
def loaded(sizes: Sizes, kernel: str, device: torch.device, otherwise: str) -> GpuProgram | None:
    """Compile and load a kernel, or warn of what happens ``otherwise`` and return None."""
    try:
        cubin = compiled(sizes.source(), sizes.defines(), device)
        return GpuProgram(cubin, kernel, sizes.threads, sizes.shared_bytes, device, early())
    except CannotCompile as error:
        _LOG.warning("%s: %s", otherwise, str(error).partition("\n")[0])
        return None


# The functions that have a warpgroup multiply, written out: an instruction names every number.


def add_product(columns: int) -> str:
    """Return the function that multiplies two tiles, the second of so many rows, and adds that."""
    return f"""
template <>
DEV void multiply_places<{columns}>(float* d, TilePlace a, TilePlace b) {{
    asm volatile("{_multiply(columns)}, %{columns // 2}, %{columns // 2 + 1}, 1, 1, 1, 0, 0;"
                 : {_sums(columns)} : "l"(a), "l"(b));
}}
"""


def product(columns: int) -> str:
    """Return the function that multiplies two tiles and forgets what the sums were."""
    a, b, zero = (f"%{columns // 2 + i}" for i in range(3))
    return f"""
template <>
DEV void multiply_places_afresh<{columns}>(float* d, TilePlace a, TilePlace b) {{
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, {zero}, 0;"
                 "{_multiply(columns)}, {a}, {b}, add, 1, 1, 0, 0; }}"
                 : {_sums(columns)} : "l"(a), "l"(b), "r"(0));
}}
"""


def add_product_of_held(columns: int) -> str:
    """Return the function that multiplies what threads hold by a tile.

    It adds that to the sums where they are kept, and forgets what they were elsewhere.
    """
    held = ", ".join(f"%{columns // 2 + i}" for i in range(4))
    b, kept = (f"%{columns // 2 + i}" for i in (4, 5))
    return f"""
template <>
DEV void multiply_held<{columns}>(float* d, const u32* a, TilePlace b, bool kept) {{
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, {kept}, 0;"
                 "{_multiply(columns)}, {{{held}}}, {b}, add, 1, 1, 1; }}"
                 : {_sums(columns)}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)kept));
}}
"""


def _multiply(columns: int) -> str:
    """Return the instruction and the numbers that it adds to."""
    numbers = ", ".join(f"%{i}" for i in range(columns // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{numbers}}}"


def _sums(columns: int) -> str:
    return ", ".join(f'"+f"(d[{i}])' for i in range(columns // 2))
