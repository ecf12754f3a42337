"""Followers in threads of this process, which start at once and can be inspected."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

from roseinfer.distributed import follower, processes
from tests.models.families import SHAPE, scale_weights_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


@dataclass
class Thread:
    """Stand-in for a process that a leader started."""

    thread: threading.Thread
    error: list[BaseException] = field(default_factory=list)
    returncode = 1

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else 1

    def kill(self) -> None:
        """Do nothing: a thread ends when its leader's end of the link closes."""

    def wait(self) -> None:
        self.thread.join(20)


def run_ranks_in_threads(monkeypatch: pytest.MonkeyPatch) -> list[Thread]:
    """Make leaders start threads instead of processes, and return the list of these threads."""
    started: list[Thread] = []

    def start_rank(folder: Path, rank: int, size: int) -> Any:
        def run() -> None:
            try:
                follower.run_follower(folder, rank, size)
            except BaseException as error:
                started[rank - 1].error.append(error)

        thread = threading.Thread(target=run, name=f"rank {rank}", daemon=True)
        started.append(Thread(thread))
        thread.start()
        return started[-1]

    monkeypatch.setattr(processes, "start_rank", start_rank)
    return started


def build(config: Callable[..., Any], **more: Any) -> Any:
    """Build a tiny model whose heads divide by four."""
    torch.manual_seed(3)
    settings = SHAPE | {"num_key_value_heads": 4, "head_dim": 12} | more
    return scale_weights_up(transformers.AutoModelForCausalLM.from_config(config(**settings)))
