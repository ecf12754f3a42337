"""How ranks find each other: in a folder of their own, which nobody else can enter.

The leader starts the others, or ``torchrun`` starts all of them. They are of one host.
"""

from __future__ import annotations

import socket
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import FileStore
from torch.distributed.rendezvous import rendezvous

from roseinfer.distributed import processes
from roseinfer.distributed.ranks import LeadingRank, Links
from roseinfer.errors import ConfigError, RanksFailed

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    import torch

    from roseinfer.config import Launched

_STORE = "store"
_LONGEST_S = 300.0
"""Processes that import torch at the same time from a slow disk may take so long."""
_MEETINGS = count()


def start_others(size: int, device: torch.device, setup: Sequence[Any]) -> LeadingRank:
    """Start the other ranks as processes, and lead them. Each gets the ``setup``."""
    return _lead(processes.meeting_of(size), size, device, setup)


def lead_launched(size: int, device: torch.device, setup: Sequence[Any]) -> LeadingRank:
    """Lead the ranks that ``torchrun`` has started beside this one."""
    meeting = processes.Meeting.open()
    try:
        _launchers_store(size, 0).set(_meeting(), str(meeting.folder))
    except BaseException:
        meeting.end(met=False)
        raise
    return _lead(meeting, size, device, setup)


def follow_launched(launched: Launched) -> Path:
    """Return the folder in which the leader waits, of the ranks that ``torchrun`` has started."""
    return Path(_launchers_store(launched.size, launched.rank).get(_meeting()).decode())


def join(folder: Path, rank: int, size: int) -> tuple[Connection, Any, Sequence[Any]]:
    """Go to the leader; return the link to it, the store of all ranks, and the setup."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(folder / processes.SOCKET))
    leader = Connection(link.detach())
    leader.send(rank)
    setup: Sequence[Any] = leader.recv()
    return leader, FileStore(str(folder / _STORE), size), setup


def _lead(
    meeting: processes.Meeting, size: int, device: torch.device, setup: Sequence[Any]
) -> LeadingRank:
    met = False
    try:
        links: dict[int, Connection] = {}
        until = monotonic() + _LONGEST_S
        while len(links) < size - 1:
            link = _next_link(meeting.listener, meeting.started, until)
            links[link.recv()] = link
        for link in links.values():
            link.send(setup)
        for rank, link in links.items():
            _require_ready(rank, link)
        store = FileStore(str(meeting.folder / _STORE), size)
        in_order = [links[rank] for rank in range(1, size)]
        leading = LeadingRank(Links(in_order, meeting.started), size, store, device)
        met = True
        return leading
    finally:
        meeting.end(met=met)


def _require_ready(rank: int, link: Connection) -> None:
    """Raise unless a rank can begin: else all others would wait for it."""
    try:
        answer = link.recv()
    except (EOFError, OSError):
        answer = "it has ended"
    if answer is not None:
        raise RanksFailed(f"rank {rank} cannot begin: {answer}")


def _next_link(
    listener: socket.socket, started: Sequence[subprocess.Popen[bytes]], until: float
) -> Connection:
    """Wait for a rank to come."""
    while True:
        try:
            return Connection(listener.accept()[0].detach())
        except TimeoutError:
            ended = [process.returncode for process in started if process.poll() is not None]
            if ended or monotonic() > until:
                why = f"ended with status {ended[0]}" if ended else "did not come"
                raise RanksFailed(f"a rank {why} before the model was loaded") from None


def _launchers_store(size: int, rank: int) -> Any:
    if size < 2:
        raise ConfigError("torchrun has started a single process: give it --nproc-per-node")
    store, _, _ = next(rendezvous("env://", rank, size))
    return store


def _meeting() -> str:
    """Name the next meeting: every rank comes to the same ones in the same order."""
    return f"roseinfer/{next(_MEETINGS)}"
