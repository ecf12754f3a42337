"""One start in a process of its own: of the weights alone, or of an engine with a first text."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from roseinfer.bench.timing import synchronizer
from roseinfer.llm import LLM
from roseinfer.models import loading
from roseinfer.models.checkpoint import fetch
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roseinfer.bench.model_source import ModelSource

_FIRST_PROMPT = range(1, 33)
_FIRST_TEXT = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
_ARRANGED = "agrees_with_its_modules"
"""What ``loading`` calls as soon as the weights are as the kernels want them."""
_TRIED = "KVBlockManager"
"""What it calls when a model has been tried and only the cache is missing."""


@dataclass(frozen=True, slots=True)
class Start:
    ready_s: float
    """From the first look at the checkpoint until all is on the device."""
    first_text_s: float | None = None
    """Of a first request behind that, which launches what was not launched before."""
    weight_bytes: int | None = None
    """What the device holds of the weights alone; None where it is not a GPU, as below."""
    arranged_bytes: int | None = None
    """The most that it held by the time the weights were arranged, if they were."""
    tried_bytes: int | None = None
    """The most that it held by the time the KV cache was made."""


def save_checkpoint(source: ModelSource, folder: str) -> None:
    """Save a model that is made up, so that it can be loaded as others are."""
    network = source.network()
    network.save_pretrained(folder)
    byte_tokenizer(network.config.vocab_size).save_pretrained(folder)


def load_weights(path: str, device: str | None, dtype: str | None) -> Start:
    """Load the weights as an engine does, and do nothing else."""
    begin = time.perf_counter()
    where = resolve_device(device)
    network = fetch(path, resolve_dtype(dtype, where)).to(where)
    synchronizer(where)()
    ready_s = time.perf_counter() - begin
    held = torch.cuda.memory_allocated(where) if where.type == "cuda" else None
    del network
    return Start(ready_s, weight_bytes=held)


def start_engine(
    path: str, device: str | None, dtype: str | None, settings: Mapping[str, Any], kernels: str
) -> Start:
    """Start an engine whose compiled kernels are kept in the folder ``kernels``."""
    _keep_kernels_in(kernels)
    begin = time.perf_counter()
    where = resolve_device(device)
    sync = synchronizer(where)
    peaks: dict[str, int] = {}
    with ExitStack() as noting:
        if where.type == "cuda":
            for name in (_ARRANGED, _TRIED):
                noting.enter_context(_noted_peak(name, where, peaks))
        llm = LLM(path, device=device, dtype=dtype, **settings)
    sync()
    ready = time.perf_counter()
    llm.generate([*_FIRST_PROMPT], _FIRST_TEXT)
    ended = time.perf_counter()
    arranged, tried = peaks.get(_ARRANGED), peaks.get(_TRIED)
    return Start(ready - begin, ended - ready, arranged_bytes=arranged, tried_bytes=tried)


def _keep_kernels_in(folder: str) -> None:
    """Have this process compile into a folder, and find there what others compiled.

    torch.compile keeps its own beside other temporary files.
    """
    tempfile.tempdir = folder
    try:
        from triton import knobs
    except ImportError:  # where it is not installed nothing is compiled
        return
    knobs.cache.dir = folder


def _noted_peak(name: str, device: torch.device, peaks: dict[str, int]) -> Any:
    """Note the most memory that the device has held when ``loading`` first calls ``name``."""
    real = getattr(loading, name)

    def noting(*given: Any, **named: Any) -> Any:
        peaks.setdefault(name, torch.cuda.max_memory_allocated(device))
        return real(*given, **named)

    return patch.object(loading, name, noting)
