"""Standard output and error for a server: nobody who prints waits for a reader, or gets an error.

A thread for each writes to its descriptor. Descriptors stay as they are, so what native code writes
as it crashes is not lost.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer

MOST_HELD = 1 << 18
"""Bytes that wait for a reader. Lines beyond them are dropped and counted."""
_END_S = 1.0
"""Seconds that a reader has at the end for lines that wait."""


class QueuedOutput(io.RawIOBase):
    """Output through a thread to a descriptor, whose ``write`` neither waits nor fails."""

    def __init__(self, number: int, name: str, notices: QueuedOutput | None = None) -> None:
        """``notices`` gets the lines about this output; None where they go to itself."""
        self._number = number
        self._name = name
        self._notices = notices or self
        self._pieces: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.RLock()
        """Held while counts change. A signal's handler may print within ``write``."""
        self._held = 0
        """Bytes queued."""
        self._dropped = 0
        """Lines dropped since the last notice."""
        self._full = False
        """True from the first dropped line until nothing is queued: the notice marks the place."""
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=f"roseinfer {name}", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: ReadableBuffer, /) -> int:
        piece = bytes(data)
        with self._lock:
            self._full = self._full or self._held + len(piece) > MOST_HELD
            if self._full:
                self._dropped += piece.count(b"\n")
            else:
                self._held += len(piece)
                self._pieces.put(piece)
        return len(piece)

    def end(self, until: float) -> None:
        """Write what is queued until a monotonic time. What is printed later is lost."""
        self._pieces.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        ended = False
        while not (ended and self._pieces.empty()):
            piece = self._pieces.get()
            if piece is None:
                ended = True
            else:
                self._note(piece, self._write_out(piece))

    def _write_out(self, piece: bytes) -> OSError | None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._number, rest) :]
        except OSError as error:  # no room, no reader, no descriptor: serving goes on
            return error
        return None

    def _note(self, piece: bytes, error: OSError | None) -> None:
        with self._lock:
            self._held -= len(piece)
            self._full = self._full and self._held > 0
            if error is not None:
                self._dropped += piece.count(b"\n")
                if not self._failing:
                    self._say(f"{error.strerror}; lines are dropped until it takes them again")
            elif self._dropped and not self._full:
                dropped, self._dropped = self._dropped, 0
                self._say(f"{dropped} lines were dropped")
            self._failing = error is not None

    def _say(self, what: str) -> None:
        self._notices.write(f"{self._name}: {what}\n".encode())


@contextmanager
def queued_streams() -> Iterator[None]:
    """Queue what is printed meanwhile, and open closed standard descriptors before all else.

    A socket would get the number of a closed one, and with it what is meant for standard error.
    """
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    sys.stderr = _queued(sys.stderr, "standard error")
    sys.stdout = _queued(sys.stdout, "standard output", _output_of(sys.stderr))
    queued = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        _end(queued)


def exit_now(status: int) -> NoReturn:
    """End the process at once, but for the time that queued lines have."""
    _end((sys.stdout, sys.stderr))
    os._exit(status)


def _open_closed_descriptors() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number


def _queued(stream: TextIO | None, name: str, notices: QueuedOutput | None = None) -> TextIO:
    """Return a stream to the same place. One in memory stays, since nobody waits for that."""
    if stream is None:  # it was closed when Python began
        return open(os.devnull, "w")  # it stays until the process ends
    try:
        number = stream.fileno()
    except OSError:
        return stream
    output = QueuedOutput(number, name, notices)
    return io.TextIOWrapper(  # type: ignore[type-var]  # it needs no more of a buffer
        output,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


def _output_of(stream: TextIO) -> QueuedOutput | None:
    output = getattr(stream, "buffer", None)
    return output if isinstance(output, QueuedOutput) else None


def _end(streams: tuple[TextIO, ...]) -> None:
    until = time.monotonic() + _END_S
    for stream in streams:  # output before error, which gets its notices
        if (output := _output_of(stream)) is not None:
            stream.flush()
            output.end(until)
