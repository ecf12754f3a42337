"""CUDA's driver, which comes with a GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from roseinfer.kernels.cuda.nvrtc import CannotCompile


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
