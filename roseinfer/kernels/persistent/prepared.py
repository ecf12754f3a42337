"""The kernel of a whole step made ready for a model and a cache, where there is one for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.kernels.cuda.gpu_program import GpuProgram, compiled, together
from roseinfer.kernels.cuda.nvrtc import CannotCompile
from roseinfer.kernels.persistent.fitting import sizes_of, why_not, why_not_on, with_ring
from roseinfer.kernels.persistent.sizes import source
from roseinfer.kernels.persistent.whole_step import KERNEL, WholeStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kernels.cuda.gpu_program import Program
    from roseinfer.kernels.persistent.sizes import StepSizes
    from roseinfer.kernels.persistent.step_weights import StepWeights
    from roseinfer.layer_traits import LayerTraits

_LOG = logging.getLogger("roseinfer")
_THREADS = 288
"""Of a program: eight warps that multiply, and one that fetches."""


def prepared(
    weights: StepWeights,
    head_dim: int,
    max_length: int,
    caches: Sequence[tuple[Tensor, Tensor]],
    traits: Sequence[LayerTraits],
) -> WholeStep | None:
    """Return the step, or None where a model's other kernels must do. This compiles, and waits."""
    keys, _ = caches[0]
    if why_not_on(keys.device):
        return None
    device: Any = torch.cuda.get_device_properties(keys.device)
    sizes = sizes_of(weights, head_dim, keys, device.multi_processor_count)
    why = why_not(sizes, weights, keys, traits)
    cut = None if why else with_ring(sizes, device.shared_memory_per_block_optin)
    if cut is None:
        why = why or "too much for a multiprocessor's shared memory"
        _LOG.info("steps of one sequence run in several kernels: the model has %s", why)
        return None
    try:
        return WholeStep(cut, weights, caches, max_length, load(cut, keys.device))
    except CannotCompile as error:
        first = str(error).partition("\n")[0]
        _LOG.warning("steps of one sequence run in several kernels: %s", first)
        return None


def load(sizes: StepSizes, device: torch.device) -> Program:
    """Compile and load the kernel for these sizes."""
    cubin = compiled(source(), sizes.defines(), device)
    return GpuProgram(cubin, KERNEL, _THREADS, sizes.shared_bytes, device, together())
