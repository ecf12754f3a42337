"""How kernels run here: whether they can, interpreted or compiled, in what tiles, how they start.

Importing this imports no Triton, which settles when it is first imported whether kernels are
interpreted.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.errors import BadArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


def why_unusable(device: torch.device) -> str:
    """Say why no Triton kernel can run on ``device``; return nothing where they can.

    This imports Triton, so it is asked when a cache is built and never on the hot path.
    """
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    if device.type == "cuda" or (device.type == "cpu" and is_interpreted()):
        return ""
    return (
        f"Triton compiles nothing for {device.type}, and its interpreter is off "
        "(set TRITON_INTERPRET=1 before the first cache is built)"
    )


@cache
def is_interpreted() -> bool:
    """Triton's interpreter runs the kernels of this process, and nothing is compiled."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def _has_early_starts(device: int) -> bool:
    """NVIDIA GPUs of compute capability 9 and up let kernels start early that say when to wait."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


_num_gpus = cache(torch.cuda.device_count)


def num_tiles(numbers: int, of_tile: int) -> int:
    """Return how many tiles so many numbers fill, or begin to.

    Triton has such a function, and one of the next, which take a host ten times as long.
    """
    return -(-numbers // of_tile)


def power_of_two(least: int) -> int:
    """Return the first power of two that is no smaller."""
    return 1 << (least - 1).bit_length()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    early: bool | None = None,
    as_written: bool = False,
) -> Any:
    """Launch a kernel whose first argument is a tensor, on the device of that tensor.

    ``early`` is given for a kernel that has the parameter EARLY. If true, and where GPUs allow it,
    the kernel starts while the one in front of it ends. It must have waited before it writes
    anything, and before it reads what another kernel of the same step has written. What lets the
    next one in may come before the wait: each waits for the end of the one in front, which has
    waited itself. Only a step's first kernel must wait before, since others read what the step
    before wrote without waiting.

    ``as_written`` forbids the compiler to join multiplications with additions, which it may do in
    one kernel and not in another that computes the same.
    """
    device = args[0].get_device()
    options: dict[str, Any] = {"num_warps": num_warps}
    if early is not None:
        options["EARLY"] = early = early and device >= 0 and _has_early_starts(device)
        if early:
            options["launch_pdl"] = True
    if as_written:
        options["enable_fp_fusion"] = False
    # Kernels go to the current GPU, and where there is one that need not be asked for.
    if device >= 0 and _num_gpus() > 1 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[grid](*args, **options)
    return kernel[grid](*args, **options)


class KernelLauncher:
    """Launches one kernel, remembering its compiled form for argument shapes seen before.

    Triton's own launch inspects every argument anew to find the matching specialisation, and calls
    its hooks even when nobody listens: that is most of its host time. Here what it looks at
    (dtypes, integer values, device) is a key. Unaligned tensors, launches while hooks are set, and
    versions of Triton without the private launch take the public way.
    """

    _MOST_REMEMBERED = 512

    def __init__(self, kernel: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._kernel = kernel
        self._driver = driver
        self._hooks = knobs.runtime
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        scalars: tuple[int, ...],
        shape: tuple[int, ...],
        num_warps: int,
    ) -> None:
        """Launch with ``(*tensors, *scalars, *shape)``.

        The kernel is not specialised on ``scalars``, and may be on every integer in ``shape``. The
        first tensor's dtype is that of all but the indices, the last one's is theirs.
        """
        first = tensors[0]
        device = first.get_device()
        if device >= 0 and _num_gpus() > 1 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, tensors, scalars, shape, num_warps)
            return
        pointer_bits = 0
        for tensor in tensors:
            pointer_bits |= tensor.data_ptr()
        aligned = pointer_bits % 16 == 0
        key = (shape, first.dtype, tensors[-1].dtype, device)
        compiled = self._compiled.get(key) if aligned else None
        if compiled is None:
            compiled = launch(self._kernel, grid, *tensors, *scalars, *shape, num_warps=num_warps)
            names = ("run", "function", "packed_metadata")  # not every version of Triton has them
            known = compiled is not None and all(hasattr(compiled, name) for name in names)
            if aligned and known:  # the interpreter compiles nothing
                if len(self._compiled) >= self._MOST_REMEMBERED:
                    self._compiled.clear()
                self._compiled[key] = compiled
        elif self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            compiled[grid](*tensors, *scalars, *shape)  # a profiler, say, listens
        else:
            compiled.run(
                *grid, self._driver.active.get_current_stream(device), compiled.function,
                compiled.packed_metadata, None, None, None, *tensors, *scalars, *shape,
            )  # fmt: skip


# The checks of what kernels are given that are called on their own.


def check_cache_pair(k_cache: torch.Tensor, v_cache: torch.Tensor, dims: int) -> None:
    if k_cache.dim() != dims or k_cache.shape != v_cache.shape:
        raise BadArgument(
            f"key and value caches must be {dims}-dimensional and of one shape; they are "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.device.type == "cpu" and not is_interpreted():
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
    """Raise unless an index tensor's kind, length and values are right; this waits for the device.

    The manager, which knows its indices, launches without these checks.
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
