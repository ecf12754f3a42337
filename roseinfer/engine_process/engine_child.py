"""One process of an engine, from its start to its end, and how often a new one may follow."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roseinfer.engine_process.any_process import Facts
from roseinfer.engine_process.portable import tokenizer_stays
from roseinfer.engine_process.wire import framed, receive
from roseinfer.errors import EngineStopped, RoseinferError

if TYPE_CHECKING:
    import argparse

_END_S = 2.0
"""Seconds that the process may take to end when the link is closed."""


@dataclass(slots=True, eq=False)
class EngineChild:
    """A process that loads the model and serves it, and the link to it."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    began: float = field(default_factory=time.monotonic)
    load_s: float = 0.0
    """Seconds until the model was loaded."""
    why: str | None = None
    """Reason why the server ended it; None where it ended by itself."""

    @classmethod
    def start(cls, args: argparse.Namespace, command: str) -> EngineChild:
        """Start one that loads a model, as options say."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "roseinfer.engine_process.child", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        with suppress(OSError):  # if it has ended, the next read shows that
            ours.sendall(framed((args, command)))
        return cls(process, ours)

    def loaded(self) -> Facts:
        """Wait until the model is loaded, and return what is to be known of it."""
        try:
            said = receive(self.link)
        except (EOFError, OSError):
            how = self.how_it_ended()
            raise EngineStopped(f"the process of the engine ended {how} as it loaded") from None
        except Exception as error:  # whatever a tokenizer's class does where it is made again
            raise tokenizer_stays(error) from error
        if isinstance(said, RoseinferError):
            raise said
        assert isinstance(said, Facts)
        self.load_s = time.monotonic() - self.began
        return said

    def how_it_ended(self) -> str:
        """Wait for its end."""
        status = self.process.wait()
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"

    def give_up(self, why: str) -> None:
        """Kill it."""
        if self.why is None:
            self.why = why
            self.process.kill()

    def end(self) -> None:
        """Close its side of the link, and wait for its end. Any thread may call this, and again."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class RestartLimit:
    """Bounds how often an engine's process is started again, and how fast."""

    most: int = 5
    """Restarts within the time."""
    within_s: float = 600.0
    delay_s: float = 1.0
    """Seconds before the second restart within that time; each later one waits twice as long."""
    _begun: list[float] = field(default_factory=list)
    """Times of the restarts that count."""

    def next_delay(self) -> float | None:
        """Count a restart, and return the seconds before it; None if there were too many."""
        now = time.monotonic()
        self._begun = [begun for begun in self._begun if now - begun < self.within_s]
        before = len(self._begun)
        if before >= self.most:
            return None
        self._begun.append(now)
        return self.delay_s * 2 ** (before - 1) if before else 0.0
