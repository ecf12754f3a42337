"""Kernels of warpgroups, each compiled and loaded when it is first wanted."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Protocol

from roseinfer.kernels.cuda.gpu_program import GpuProgram, compiled, early
from roseinfer.kernels.cuda.nvrtc import CannotCompile

if TYPE_CHECKING:
    import torch

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
