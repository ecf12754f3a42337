"""``start``: the time from a checkpoint to a ready engine, compared with loading the weights."""

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
from roseinfer.bench.peers import run_in_subprocess
from roseinfer.bench.report import Report, Table
from roseinfer.bench.timing import synchronizer
from roseinfer.cli.model_options import parsed_fields
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError
from roseinfer.llm import LLM
from roseinfer.models import loading
from roseinfer.models.checkpoint import load_checkpoint
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.locate_model import locate
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import track_progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

# One start in a process of its own: of the weights alone, or of an engine with a first request.


_FIRST_PROMPT = range(1, 33)
_FIRST_TEXT = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
_ARRANGED = "matches_modules"
"""Name that ``loading`` calls once the weights are arranged for the kernels."""
_TRIED = "KVBlockManager"
"""Name that ``loading`` calls after a trial run of the model, when only the cache is missing."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Times and peak memory of one start."""

    ready_s: float
    """Seconds from the first read of the checkpoint until all is on the device."""
    first_text_s: float | None = None
    """Seconds of the first request after that, with first launches; None for the weights alone."""
    weight_bytes: int | None = None
    """GPU memory of the weights alone; None without a GPU, as are the fields below."""
    weights_peak_bytes: int | None = None
    """Peak GPU memory until the weights were arranged; None if they were not."""
    before_cache_peak_bytes: int | None = None
    """Peak GPU memory until the KV cache was allocated."""


def save_checkpoint(source: ModelSource, folder: str) -> None:
    """Save a model with random weights as a checkpoint, so that it can be loaded like others."""
    network = source.network()
    network.save_pretrained(folder)
    byte_tokenizer(network.config.vocab_size).save_pretrained(folder)


def load_weights(path: str, device: str | None, dtype: str | None) -> StartTimes:
    """Time loading the weights as an engine does, and nothing else."""
    begin = time.perf_counter()
    target_device = resolve_device(device)
    network = load_checkpoint(path, resolve_dtype(dtype, target_device)).to(target_device)
    synchronizer(target_device)()
    ready_s = time.perf_counter() - begin
    weight_bytes = (
        torch.cuda.memory_allocated(target_device) if target_device.type == "cuda" else None
    )
    del network
    return StartTimes(ready_s, weight_bytes=weight_bytes)


def start_engine(
    path: str, device: str | None, dtype: str | None, settings: Mapping[str, Any], kernels: str
) -> StartTimes:
    """Time the start of an engine that caches compiled kernels in the folder ``kernels``."""
    _keep_kernels_in(kernels)
    begin = time.perf_counter()
    target_device = resolve_device(device)
    sync = synchronizer(target_device)
    peaks: dict[str, int] = {}
    with ExitStack() as patches:
        if target_device.type == "cuda":
            for name in (_ARRANGED, _TRIED):
                patches.enter_context(_record_peak(name, target_device, peaks))
        llm = LLM(path, device=device, dtype=dtype, **settings)
    sync()
    ready = time.perf_counter()
    llm.generate([*_FIRST_PROMPT], _FIRST_TEXT)
    finished = time.perf_counter()
    arranged, tried = peaks.get(_ARRANGED), peaks.get(_TRIED)
    return StartTimes(
        ready - begin,
        finished - ready,
        weights_peak_bytes=arranged,
        before_cache_peak_bytes=tried,
    )


def _keep_kernels_in(folder: str) -> None:
    """Set the folder of this process's cache of compiled kernels, which processes can share.

    torch.compile caches its kernels in the folder of temporary files.
    """
    tempfile.tempdir = folder
    try:
        from triton import knobs
    except ImportError:  # without Triton nothing is compiled
        return
    knobs.cache.dir = folder


def _record_peak(name: str, device: torch.device, peaks: dict[str, int]) -> Any:
    """Record the device's peak memory at the first call of ``name`` by ``loading``."""
    real = getattr(loading, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        peaks.setdefault(name, torch.cuda.max_memory_allocated(device))
        return real(*args, **kwargs)

    return patch.object(loading, name, recorded)


_CAPTION = """\
Each start in a process of its own that has imported torch and transformers; medians. The files are
in the page cache. weights alone: read, and copied to the device. ready s: until the engine is
ready; overhead s: that less the weights alone. first text s: the first request after that, with 32
prompt tokens and 8 new ones. Peaks: peak GPU memory over that of the weights alone, until the
weights are arranged for fused kernels, and until the model's trial run, before the KV cache."""
_ALONE = "weights alone"
_COLD = "engine, kernels not yet compiled"
_WARM = "engine, kernels on disk"
_TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class StartRow:
    """Times and memory of one kind of start, over its runs."""

    start: str
    runs: int
    ready_s: float
    overhead_s: float | None
    first_text_s: float | None
    peak_weights: float | None
    peak_before_cache: float | None


def run(args: argparse.Namespace) -> Report:
    source, settings = ModelSource.of(args), parsed_fields(args, EngineConfig)
    device_and_dtype = source.device, source.dtype
    starts: dict[str, list[StartTimes]] = {_ALONE: [], _COLD: [], _WARM: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        track_progress(2 + 2 * args.repeat_runs, "start", "processes") as done,
    ):
        saved, kernels = (str(Path(folder, name)) for name in ("model", "kernels"))
        Path(kernels).mkdir()
        if source.random_weights or source.name == "tiny":
            path = saved
            _in_process(save_checkpoint, source, saved)
        else:
            path = locate(source.name)
            _in_process(
                load_weights, path, *device_and_dtype
            )  # reads the files into the page cache
        done()
        engine = path, *device_and_dtype, settings, kernels
        starts[_COLD].append(_in_process(start_engine, *engine))
        done()
        for _ in range(args.repeat_runs):
            starts[_ALONE].append(_in_process(load_weights, path, *device_and_dtype))
            done()
            starts[_WARM].append(_in_process(start_engine, *engine))
            done()
    config = {"model": source.name, "repeat_runs": args.repeat_runs, **settings}
    table = Table("starts", _CAPTION, make_start_rows(starts))
    return Report("start", args.command, resolve_device(source.device), config, [table])


def _in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``work`` in a subprocess; raise if it failed."""
    result = run_in_subprocess(work, *arguments, time_limit_s=_TIME_LIMIT_S)
    if isinstance(result, str):
        raise ConfigError(f"the process that starts the model failed: {result}")
    return result


def make_start_rows(starts: dict[str, list[StartTimes]]) -> list[StartRow]:
    """Return a row for each kind of start, compared with loading the weights alone."""
    weight_starts = starts[_ALONE]
    alone_s = median(start.ready_s for start in weight_starts)
    weights = weight_starts[0].weight_bytes
    rows = []
    for kind, times in starts.items():
        ready_s = median(start.ready_s for start in times)
        texts = [start.first_text_s for start in times if start.first_text_s is not None]
        rows.append(
            StartRow(
                start=kind,
                runs=len(times),
                ready_s=ready_s,
                overhead_s=ready_s - alone_s if kind != _ALONE else None,
                first_text_s=median(texts) if texts else None,
                peak_weights=_times([start.weights_peak_bytes for start in times], weights),
                peak_before_cache=_times(
                    [start.before_cache_peak_bytes for start in times], weights
                ),
            )
        )
    return rows


def _times(peaks: Sequence[int | None], weights: int | None) -> float | None:
    """Return the largest peak over the weights' memory; None if either is unknown."""
    recorded_peaks = [peak for peak in peaks if peak is not None]
    return max(recorded_peaks) / weights if recorded_peaks and weights else None
