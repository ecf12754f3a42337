"""Starts ranks as processes, which importing torch is not needed for.

A command starts them before it imports torch, so that all of them import it at the same time.
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
_GLANCE_S = 0.2
_MOST_EARLY = 8
"""Most hosts have no more GPUs. More ranks are started when it is known that there are so many."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks come to their leader: a folder that only this user enters."""

    folder: Path
    listener: socket.socket
    started: list[subprocess.Popen[bytes]]

    @classmethod
    def open(cls) -> Meeting:
        folder = Path(tempfile.mkdtemp(prefix="roseinfer-"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / SOCKET))
        listener.listen()
        listener.settimeout(_GLANCE_S)
        return cls(folder, listener, [])

    def start(self, size: int) -> None:
        """Start all ranks but the first."""
        for rank in range(1, size):
            self.started.append(start_rank(self.folder, rank, size))

    def end(self, *, met: bool) -> None:
        """Take the folder away; those that were started end too unless they have ``met``."""
        gone = [] if met else self.started
        for process in gone:
            process.kill()
        for process in gone:
            process.wait()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_early: dict[int, Meeting] = {}
"""Meetings whose ranks were started before there was a leader, by how many ranks there will be."""


@contextmanager
def started_early(size: int) -> Iterator[None]:
    """Start the ranks of the model that is loaded meanwhile, if it has several."""
    try:
        if 1 < size <= _MOST_EARLY:
            _early[size] = Meeting.open()
            _early[size].start(size)
        yield
    finally:
        if unmet := _early.pop(size, None):
            unmet.end(met=False)


def meeting_of(size: int) -> Meeting:
    """Return a meeting to which so many ranks are on their way."""
    if (early := _early.pop(size, None)) is not None:
        return early
    meeting = Meeting.open()
    try:
        meeting.start(size)
    except BaseException:
        meeting.end(met=False)
        raise
    return meeting


def start_rank(folder: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
    """Start a process that goes to the leader who waits in a folder.

    It ends when this one has, and a terminal's Ctrl-C is for this one alone.
    """
    command = [sys.executable, "-m", "roseinfer.distributed.follower", str(folder)]
    command += [str(rank), str(size), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
