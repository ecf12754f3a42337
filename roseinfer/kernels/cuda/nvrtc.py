"""CUDA's compiler at run time, which comes with torch: it needs no toolkit and no host compiler."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
