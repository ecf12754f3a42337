"""Start of ranks as processes, without importing torch.

A command starts them before it imports torch itself, so that all processes import it in parallel.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOCKET = "leader"
_POLL_S = 0.2
_MAX_PRESTARTED = 8
"""Most ranks started before torch is imported, the GPUs of most hosts. With more ranks, all are
started later, once the number of GPUs is known."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A folder with a socket, where ranks connect to their leader. Only this user has access."""

    folder: Path
    listener: socket.socket
    child_processes: list[subprocess.Popen[bytes]]

    @classmethod
    def open(cls) -> Rendezvous:
        folder = Path(tempfile.mkdtemp(prefix="roseinfer-"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / SOCKET))
        listener.listen()
        listener.settimeout(_POLL_S)
        return cls(folder, listener, [])

    def start(self, size: int) -> None:
        """Start all ranks but the first."""
        for rank in range(1, size):
            self.child_processes.append(start_rank(self.folder, rank, size))

    def end(self, *, connected: bool) -> None:
        """Remove the folder, and kill the child processes unless they have ``connected``."""
        unused = [] if connected else self.child_processes
        for process in unused:
            process.kill()
        for process in unused:
            process.wait()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_prestarted: dict[int, Rendezvous] = {}
"""Rendezvous whose ranks were started before their leader needs them, by number of ranks."""


@contextmanager
def prestarted_ranks(size: int) -> Iterator[None]:
    """Start the other ranks of the model that the block loads, if it has several."""
    try:
        if 1 < size <= _MAX_PRESTARTED:
            _prestarted[size] = Rendezvous.open()
            _prestarted[size].start(size)
        yield
    finally:
        if unused := _prestarted.pop(size, None):
            unused.end(connected=False)


def take_rendezvous(size: int) -> Rendezvous:
    """Return a rendezvous whose ``size`` - 1 other ranks were started, now or in advance."""
    if (prestarted := _prestarted.pop(size, None)) is not None:
        return prestarted
    rendezvous = Rendezvous.open()
    try:
        rendezvous.start(size)
    except BaseException:
        rendezvous.end(connected=False)
        raise
    return rendezvous


def start_rank(folder: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
    """Start a process that connects to the leader in ``folder``.

    It ends after this process has ended, and does not receive a terminal's Ctrl-C.
    """
    command = [sys.executable, "-m", "roseinfer.distributed", str(folder)]
    command += [str(rank), str(size), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
