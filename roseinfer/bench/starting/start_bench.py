"""``start``: the time from a checkpoint to an engine that is ready, beside loading it alone."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from roseinfer.bench.arguments import engine_settings
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.peers.isolation import in_process
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.starting.one_start import Start, load_weights, save_checkpoint, start_engine
from roseinfer.errors import ConfigError
from roseinfer.how_far import counting
from roseinfer.models.loading import resolve_device
from roseinfer.models.source import locate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

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
    source, settings = ModelSource.of(args), engine_settings(args)
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
