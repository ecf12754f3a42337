"""Rendezvous of the ranks of one host, in a folder that only this user can access.

The leader starts the others, or ``torchrun`` starts all of them.
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
from roseinfer.distributed.ranks import LeadingRank, RankConnections
from roseinfer.errors import ConfigError, RanksFailed

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    import torch

    from roseinfer.config import TorchrunRank

_STORE = "store"
_CONNECT_TIMEOUT_S = 300.0
"""Seconds that ranks may take to connect: all import torch at once, maybe from a slow disk."""
_RENDEZVOUS_NUMBERS = count()


def start_and_lead(size: int, device: torch.device, setup: Sequence[Any]) -> LeadingRank:
    """Start the other ranks as processes, send each the ``setup``, and lead them."""
    return _lead(processes.take_rendezvous(size), size, device, setup)


def lead_launched(size: int, device: torch.device, setup: Sequence[Any]) -> LeadingRank:
    """Lead the other ranks that ``torchrun`` has started; send each the ``setup``."""
    meeting_point = processes.Rendezvous.open()
    try:
        _launchers_store(size, 0).set(_rendezvous_key(), str(meeting_point.folder))
    except BaseException:
        meeting_point.end(connected=False)
        raise
    return _lead(meeting_point, size, device, setup)


def follow_launched(launched: TorchrunRank) -> Path:
    """Return the leader's rendezvous folder, for ranks that ``torchrun`` has started."""
    return Path(_launchers_store(launched.size, launched.rank).get(_rendezvous_key()).decode())


def connect_to_leader(folder: Path, rank: int, size: int) -> tuple[Connection, Any, Sequence[Any]]:
    """Connect to the leader; return the link to it, the store of all ranks, and the setup."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(folder / processes.SOCKET))
    leader = Connection(link.detach())
    leader.send(rank)
    setup: Sequence[Any] = leader.recv()
    return leader, FileStore(str(folder / _STORE), size), setup


def _lead(
    meeting_point: processes.Rendezvous, size: int, device: torch.device, setup: Sequence[Any]
) -> LeadingRank:
    connected = False
    try:
        links: dict[int, Connection] = {}
        until = monotonic() + _CONNECT_TIMEOUT_S
        while len(links) < size - 1:
            link = _accept_rank(meeting_point.listener, meeting_point.child_processes, until)
            links[link.recv()] = link
        for link in links.values():
            link.send(setup)
        for rank, link in links.items():
            _require_ready(rank, link)
        store = FileStore(str(meeting_point.folder / _STORE), size)
        in_order = [links[rank] for rank in range(1, size)]
        leading = LeadingRank(
            RankConnections(in_order, meeting_point.child_processes), size, store, device
        )
        connected = True
        return leading
    finally:
        meeting_point.end(connected=connected)


def _require_ready(rank: int, link: Connection) -> None:
    """Raise unless a rank is ready to load: otherwise all others would wait for it."""
    try:
        reply = link.recv()
    except (EOFError, OSError):
        reply = "it has ended"
    if reply is not None:
        raise RanksFailed(f"rank {rank} cannot start: {reply}")


def _accept_rank(
    listener: socket.socket, started: Sequence[subprocess.Popen[bytes]], until: float
) -> Connection:
    """Wait for a rank to connect."""
    while True:
        try:
            return Connection(listener.accept()[0].detach())
        except TimeoutError:
            statuses = [process.returncode for process in started if process.poll() is not None]
            if statuses or monotonic() > until:
                reason = f"ended with status {statuses[0]}" if statuses else "did not connect"
                raise RanksFailed(f"a rank {reason} before the model was loaded") from None


def _launchers_store(size: int, rank: int) -> Any:
    if size < 2:
        raise ConfigError("torchrun started a single process; give it --nproc-per-node")
    store, _, _ = next(rendezvous("env://", rank, size))
    return store


def _rendezvous_key() -> str:
    """Return the key of the next rendezvous; all ranks have the same ones in the same order."""
    return f"roseinfer/{next(_RENDEZVOUS_NUMBERS)}"
