"""The same work on other systems, each in a process of its own: what fails there stays there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from roseinfer.bench.model_source import ModelSource
    from roseinfer.bench.serving.figures import ThroughputRow
    from roseinfer.bench.serving.prompts import Work

CAPTION = """\
The same prompts on other systems, all at once, the likeliest token up to the full length;
medians over the repeated runs. ms per step: of theirs, the time for all tokens less that for
one token each, by the tokens between; of ours, the median decode step. set-up that a system
does in every call counts."""
PEERS = ("transformers-static", "transformers-continuous", "vllm")
"""``generate`` with a static cache, which compiles itself on a GPU; ``generate_batch``; vLLM."""
_TIME_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class PeerJob:
    """The work, as JSON has it."""

    source: dict[str, Any]
    """Fields of ``ModelSource``."""
    prompts: list[list[int]]
    max_new_tokens: int
    max_batch_size: int
    warmup_runs: int
    repeat_runs: int

    @classmethod
    def of(cls, args: argparse.Namespace, source: ModelSource, work: Work, slots: int) -> PeerJob:
        """``work`` has prompts of tokens."""
        prompts = [[int(token) for token in prompt] for prompt in work.prompts]
        new, runs = work.params.max_new_tokens, (args.warmup_runs, args.repeat_runs)
        return cls(asdict(source), prompts, new, slots, *runs)


@dataclass(frozen=True, slots=True)
class PeerRow:
    system: str
    version: str | None = None
    total_s: float | None = None
    completion_tok_per_s: float | None = None
    ms_per_step: float | None = None
    not_available: str | None = None


def named(names: Sequence[str] | None) -> tuple[str, ...]:
    """None for none of them, and nothing in particular for all."""
    if names is None:
        return ()
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers {' '.join(unknown)}: there are {', '.join(PEERS)}")
    return tuple(names) or PEERS


def compare(names: Sequence[str], job: PeerJob, ours: ThroughputRow) -> list[PeerRow]:
    """Our own row, then that of every peer."""
    figures = (ours.total_s, ours.completion_tok_per_s, ours.decode_step_ms)
    rows = [PeerRow(f"roseinfer, {ours.run}", None, *figures)]
    for name in tqdm(names, desc="peers", unit="peer", disable=None):
        rows.append(measure(name, job))
    return rows


def measure(name: str, job: PeerJob, time_limit_s: float = _TIME_LIMIT_S) -> PeerRow:
    """A peer's figures, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, told = (Path(folder, part) for part in ("job.json", "row.json", "stderr"))
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "roseinfer.bench.serving.peer_process"]
        status = _run([*command, name, str(asked), str(answered)], told, time_limit_s)
        if status is None:
            return PeerRow(name, not_available=f"it took longer than {time_limit_s:g} s")
        if status or not answered.exists():
            lines = told.read_text(encoding="utf-8", errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()] or ["it said nothing"]
            return PeerRow(name, not_available=f"exit status {status}: {said[-1]}")
        return PeerRow(**json.loads(answered.read_text(encoding="utf-8")))


def _run(command: Sequence[str], told: Path, time_limit_s: float) -> int | None:
    """The exit status; None for a process that did not end in time. None it started is left."""
    with told.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            return process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
