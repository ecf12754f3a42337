"""The same work on other systems, each in a process of its own: what fails there stays there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.bench.figures import ThroughputRow

CAPTION = """\
The same prompts on other systems, all at once, the likeliest token up to the full length;
medians over the repeated runs. ms per step: of theirs, the time for all tokens less that for
one token each, by the tokens between; of ours, the median decode step. set-up that a system
does in every call counts."""
PEERS = ("transformers-static", "transformers-continuous", "vllm")
"""``generate`` with a static cache, which compiles itself on a GPU; ``generate_batch``; vLLM."""
TIME_LIMIT_S = 900.0


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


@dataclass(frozen=True, slots=True)
class PeerRow:
    system: str
    version: str | None
    total_s: float | None
    completion_tok_per_s: float | None
    ms_per_step: float | None
    not_available: str | None

    @classmethod
    def ours(cls, row: ThroughputRow) -> PeerRow:
        return cls(
            f"roseinfer, {row.run}",
            None,
            row.total_s,
            row.completion_tok_per_s,
            row.decode_step_ms,
            None,
        )


def named(names: Sequence[str] | None) -> tuple[str, ...]:
    """None for none of them, and nothing in particular for all."""
    if names is None:
        return ()
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers {' '.join(unknown)}: there are {', '.join(PEERS)}")
    return tuple(names) or PEERS


def compare(names: Sequence[str], job: PeerJob, ours: PeerRow) -> list[PeerRow]:
    rows = [ours]
    for name in tqdm(names, desc="peers", unit="peer", disable=None):
        rows.append(measure(name, job))
    return rows


def measure(name: str, job: PeerJob, time_limit_s: float = TIME_LIMIT_S) -> PeerRow:
    """A peer's figures, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "job.json"), Path(folder, "row.json")
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "roseinfer.bench.peer_process"]
        try:
            process = subprocess.run(
                [*command, name, str(asked), str(answered)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=time_limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _without(name, f"it took longer than {time_limit_s:.0f} s")
        if process.returncode or not answered.exists():
            return _without(name, _reason(process))
        return PeerRow(**json.loads(answered.read_text(encoding="utf-8")))


def _without(name: str, reason: str) -> PeerRow:
    return PeerRow(name, None, None, None, None, reason)


def _reason(process: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    return f"exit status {process.returncode}: {last}"
