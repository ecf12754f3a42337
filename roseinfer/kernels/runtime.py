"""Launching of Triton kernels: support, interpretation, tile counts, and early starts.

Importing this does not import Triton, which decides at its first import whether kernels are
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


def unusable_reason(device: torch.device) -> str:
    """Return why no Triton kernel can run on ``device``; empty where they can.

    This imports Triton. It is called when a cache is built and never on the hot path.
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
    """Return True if Triton's interpreter runs this process's kernels, without compiling any."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def _supports_pdl(device: int) -> bool:
    """Return True for NVIDIA GPUs with programmatic dependent launch: capability 9 or more."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


_num_gpus = cache(torch.cuda.device_count)


def cdiv(numbers: int, of_tile: int) -> int:
    """Return ``numbers / of_tile``, rounded up.

    Triton's own versions of this function and the next take ten times as long on the host.
    """
    return -(-numbers // of_tile)


def next_power_of_2(least: int) -> int:
    """Return the first power of two that is at least ``least``."""
    return 1 << (least - 1).bit_length()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    pdl: bool | None = None,
    no_fp_fusion: bool = False,
) -> Any:
    """Launch a kernel whose first argument is a tensor, on the device of that tensor.

    ``pdl`` is passed for a kernel that has the parameter EARLY. If true, and where GPUs support
    programmatic dependent launch, the kernel starts while the previous one ends. It must have
    waited before it writes anything, and before it reads what another kernel of the same step has
    written. It may launch its dependents before the wait: each kernel waits for the end of the
    previous one, which has waited itself. Only a step's first kernel must wait before that, since
    others read what the previous step wrote without waiting.

    ``no_fp_fusion`` stops the compiler from fusing multiplications with additions, which it might
    do in one kernel and not in another that computes the same result.
    """
    device = args[0].get_device()
    options: dict[str, Any] = {"num_warps": num_warps}
    if pdl is not None:
        options["EARLY"] = pdl = pdl and device >= 0 and _supports_pdl(device)
        if pdl:
            options["launch_pdl"] = True
    if no_fp_fusion:
        options["enable_fp_fusion"] = False
    # Kernels go to the current GPU. With a single GPU, it need not be queried.
    if device >= 0 and _num_gpus() > 1 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[grid](*args, **options)
    return kernel[grid](*args, **options)


class KernelLauncher:
    """Launcher of one kernel, which caches its compiled form by the shapes of arguments.

    Triton's own launch inspects every argument anew to find the matching specialisation, and calls
    its hooks even without any: that is most of its host time. Here what it inspects (dtypes,
    integer values, device) is a key. Unaligned tensors, launches while hooks are set, and versions
    of Triton without the private launch use the public one.
    """

    _MAX_CACHED_LAUNCHES = 512

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
        dtype of the first tensor is that of all but the indices; the last tensor's is that of the
        indices.
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
                if len(self._compiled) >= self._MAX_CACHED_LAUNCHES:
                    self._compiled.clear()
                self._compiled[key] = compiled
        elif self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            compiled[grid](*tensors, *scalars, *shape)  # for hooks, such as a profiler's
        else:
            compiled.run(
                *grid, self._driver.active.get_current_stream(device), compiled.function,
                compiled.packed_metadata, None, None, None, *tensors, *scalars, *shape,
            )  # fmt: skip


# Argument checks of kernels that are called directly.


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
    """Raise unless an index tensor's dtype, shape and values are right; this waits for the device.

    The cache manager, whose indices are valid, launches without these checks.
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
