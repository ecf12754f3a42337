"""``start``: the time from a checkpoint to an engine that is ready, beside loading it alone."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.peers import in_process
from roseinfer.bench.report import Report, Table
from roseinfer.bench.timing import synchronizer
from roseinfer.cli.model_options import given_of
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError
from roseinfer.llm import LLM
from roseinfer.models import loading
from roseinfer.models.checkpoint import fetch
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.source import locate
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.progress import counting
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

# One start in a process of its own: of the weights alone, or of an engine with a first text.


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


_CAPTION = """\
Each start in a process of its own that has imported torch and transformers; medians. The files are
in the system's cache. weights alone: read and put on the device. more s: until the engine is ready,
over that. first text s: of a prompt of 32 tokens and 8 new ones, behind that. Peaks are the most
GPU memory held by then, in units of what the weights alone take: when the weights were arranged for
fused kernels, and when the model was tried and only the KV cache was missing."""
_ALONE = "weights alone"
_COLD = "engine, kernels to be compiled"
_WARM = "engine, kernels on disk"
_TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class StartRow:
    start: str
    runs: int
    ready_s: float
    more_s: float | None
    first_text_s: float | None
    peak_arranged: float | None
    peak_tried: float | None


def run(args: argparse.Namespace) -> Report:
    source, settings = ModelSource.of(args), given_of(args, EngineConfig)
    where = source.device, source.dtype
    starts: dict[str, list[Start]] = {_ALONE: [], _COLD: [], _WARM: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        counting(2 + 2 * args.repeat_runs, "start", "processes") as done,
    ):
        saved, kernels = (str(Path(folder, name)) for name in ("model", "kernels"))
        Path(kernels).mkdir()
        if source.random_weights or source.name == "tiny":
            path = saved
            _in_process(save_checkpoint, source, saved)
        else:
            path = locate(source.name)
            _in_process(load_weights, path, *where)  # has the system read its files
        done()
        engine = path, *where, settings, kernels
        starts[_COLD].append(_in_process(start_engine, *engine))
        done()
        for _ in range(args.repeat_runs):
            starts[_ALONE].append(_in_process(load_weights, path, *where))
            done()
            starts[_WARM].append(_in_process(start_engine, *engine))
            done()
    config = {"model": source.name, "repeat_runs": args.repeat_runs, **settings}
    table = Table("starts", _CAPTION, rows_of(starts))
    return Report("start", args.command, resolve_device(source.device), config, [table])


def _in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``work`` returns; a text is what went wrong there."""
    found = in_process(work, *arguments, time_limit_s=_TIME_LIMIT_S)
    if isinstance(found, str):
        raise ConfigError(f"a process that was to start the model ended otherwise: {found}")
    return found


def rows_of(starts: dict[str, list[Start]]) -> list[StartRow]:
    """Set every kind of start against loading the weights alone."""
    alone = starts[_ALONE]
    alone_s = median(start.ready_s for start in alone)
    weights = alone[0].weight_bytes
    rows = []
    for kind, taken in starts.items():
        ready_s = median(start.ready_s for start in taken)
        texts = [start.first_text_s for start in taken if start.first_text_s is not None]
        rows.append(
            StartRow(
                start=kind,
                runs=len(taken),
                ready_s=ready_s,
                more_s=ready_s - alone_s if kind != _ALONE else None,
                first_text_s=median(texts) if texts else None,
                peak_arranged=_times([start.arranged_bytes for start in taken], weights),
                peak_tried=_times([start.tried_bytes for start in taken], weights),
            )
        )
    return rows


def _times(peaks: Sequence[int | None], weights: int | None) -> float | None:
    """Return the largest peak in units of the weights, where there are both."""
    known = [peak for peak in peaks if peak is not None]
    return max(known) / weights if known and weights else None
