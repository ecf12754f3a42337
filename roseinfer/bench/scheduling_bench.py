"""``scheduling``: the host's time to decide on a step, by how many requests run and wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.bench.arguments import add_outputs, whole
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.timing import in_rounds, time_calls
from roseinfer.config import SamplingParams
from roseinfer.llm import LLM

if TYPE_CHECKING:
    import argparse

    from roseinfer.engine.scheduler import Scheduler

_CAPTION = """\
Deciding on a step in which all running requests decode and nobody comes or goes, us of host
time. Wanted: at most 2 us for each running request, whatever waits."""
_PROMPT = 2
_BLOCK_SIZE = 64
_CALLS = 50


@dataclass(frozen=True, slots=True)
class SchedulingRow:
    running: int
    waiting: int
    step_us: float
    us_per_running: float


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("scheduling", help="what deciding on a step costs the host")
    option = parser.add_argument
    option("--running", type=whole(1), nargs="+", default=[16, 64, 256, 1024], metavar="N")
    option("--waiting", type=whole(0), nargs="+", default=[0, 10_000], metavar="N")
    option("--quick", action="store_true", help="few rounds: does it run?")
    add_outputs(parser, plot=False)
    parser.set_defaults(run=_measure)


def _measure(args: argparse.Namespace) -> Report:
    rounds = 3 if args.quick else 30
    rows = [
        measure(running, waiting, rounds) for running in args.running for waiting in args.waiting
    ]
    tables = (Table("scheduling", _CAPTION, rows),)
    return Report("scheduling", args.command, torch.device("cpu"), {"rounds": rounds}, tables)


def measure(running: int, waiting: int, rounds: int) -> SchedulingRow:
    scheduler = _busy(running, waiting)
    step = scheduler.next_step()
    if len(step.decoding) != running or step.chunks:
        raise RuntimeError(f"{running} were to decode, not {len(step.decoding)}")

    def decide() -> float:
        return time_calls(scheduler.next_step, _CALLS)

    microseconds = in_rounds({"step": decide}, rounds, "scheduling")["step"].median_us
    return SchedulingRow(running, waiting, microseconds, microseconds / running)


def _busy(running: int, waiting: int) -> Scheduler:
    """The scheduler of an engine in which so many requests decode and others wait."""
    prompt = [1] * _PROMPT
    engine = LLM(
        "tiny",
        device="cpu",
        max_batch_size=running,
        block_size=_BLOCK_SIZE,
        kv_cache_tokens=(running + 1) * _BLOCK_SIZE,
        prefill_max_batch_size=running,
        prefill_max_tokens=running * _PROMPT,
    ).engine
    for _ in range(running):
        engine.submit(prompt, SamplingParams())
    engine.step()
    for _ in range(waiting):
        engine.submit(prompt, SamplingParams())
    return engine._scheduler
