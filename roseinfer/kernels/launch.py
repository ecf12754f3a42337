"""Launching Triton kernels cheaply, and checking what is handed to them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.runtime import driver

from roseinfer.errors import BadArgument

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class KernelLauncher:
    """Launches one kernel, remembering its compiled form for argument shapes seen before.

    Triton's own launch inspects every argument anew to find the matching specialisation,
    and calls its hooks even when nobody listens, which together is most of its host time.
    What it looks at (dtypes, integer values, pointer alignment, device) is the key here.
    Anything unaligned, and everything while hooks are set, takes Triton's own way.
    """

    _MOST_REMEMBERED = 512

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        scalars: tuple[int, ...],
        shape: tuple[int, ...],
        num_warps: int,
    ) -> None:
        """Run with ``(*tensors, *scalars, *shape)``.

        ``scalars`` are the parameters the kernel does not specialise on; every integer in
        ``shape`` may be specialised on or be a constant of the kernel. The first tensor's
        dtype stands for all but the indices, the last one's for those.
        """
        first = tensors[0]
        device = first.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, tensors, scalars, shape, num_warps)
            return
        pointer_bits = 0
        for tensor in tensors:
            pointer_bits |= tensor.data_ptr()
        if pointer_bits % 16:
            self._kernel[grid](*tensors, *scalars, *shape, num_warps=num_warps)
            return
        key = (shape, first.dtype, tensors[-1].dtype, device)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._remember(key, self._kernel[grid](*tensors, *scalars, *shape, num_warps=num_warps))
        elif _hooks_are_set():
            compiled[grid](*tensors, *scalars, *shape)
        else:
            compiled.run(
                *grid, driver.active.get_current_stream(device), compiled.function,
                compiled.packed_metadata, None, None, None, *tensors, *scalars, *shape,
            )  # fmt: skip

    def _remember(self, key: tuple[object, ...], compiled: Any) -> None:
        if compiled is None:  # the interpreter compiles nothing
            return
        if len(self._compiled) >= self._MOST_REMEMBERED:
            self._compiled.clear()
        self._compiled[key] = compiled


def _hooks_are_set() -> bool:
    """Whether anyone, a profiler say, listens to Triton's launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels go to the current GPU, which need not be the one the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_cache_pair(k_cache: torch.Tensor, v_cache: torch.Tensor, dims: int) -> None:
    if k_cache.dim() != dims or k_cache.shape != v_cache.shape:
        raise BadArgument(
            f"key and value caches must be {dims}-dimensional and of one shape; they are "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.device.type == "cpu" and not knobs.runtime.interpret:
        raise BadArgument(
            "the caches are on the CPU, where Triton kernels need its interpreter: set "
            "TRITON_INTERPRET=1 before roseinfer is imported"
        )
    if k_cache.dtype != v_cache.dtype or k_cache.device != v_cache.device:
        raise BadArgument(
            "key and value caches must share dtype and device; they are "
            f"{k_cache.dtype} on {k_cache.device} and {v_cache.dtype} on {v_cache.device}"
        )


def check_index(
    name: str, index: torch.Tensor, like: torch.Tensor, length: int, bound: int
) -> None:
    """An index tensor as the kernels need it: its kind, its length and every value.

    Reading the values waits for the device. The manager, which knows its indices, launches
    without these checks.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise BadArgument(f"{name} must be int32 or int64, not {index.dtype}")
    if index.device != like.device:
        raise BadArgument(f"{name} is on {index.device} and the cache on {like.device}")
    if index.shape != (length,):
        raise BadArgument(f"{name} must have shape ({length},), not {tuple(index.shape)}")
    if length:
        low, high = (int(edge) for edge in torch.aminmax(index))
        if low < 0 or high >= bound:
            raise BadArgument(f"{name} must lie in 0..{bound - 1}; it spans {low}..{high}")
