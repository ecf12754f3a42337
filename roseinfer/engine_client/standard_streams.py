"""Standard output and error of a server: printing neither blocks nor fails.

A thread for each stream writes to its descriptor. The descriptors do not change, so the output of
native code in a crash is not lost.
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

MAX_QUEUED_BYTES = 1 << 18
"""Bytes queued for a slow reader, at most. Lines beyond them are dropped and counted."""
_END_S = 1.0
"""Seconds to write the queued lines at the end of the process."""


class QueuedOutput(io.RawIOBase):
    """Output through a thread to a descriptor, whose ``write`` neither blocks nor fails."""

    def __init__(self, number: int, name: str, notices: QueuedOutput | None = None) -> None:
        """Start the thread; ``notices`` gets lines about dropped output, or this output if None."""
        self._number = number
        self._name = name
        self._notices = notices or self
        self._pieces: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.RLock()
        """Lock of the counts; reentrant, since a signal handler may print during ``write``."""
        self._queued_bytes = 0
        """Bytes in the queue."""
        self._dropped = 0
        """Lines dropped since the last notice."""
        self._full = False
        """True from the first dropped line until the queue is empty, when the notice is printed."""
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
            self._full = self._full or self._queued_bytes + len(piece) > MAX_QUEUED_BYTES
            if self._full:
                self._dropped += piece.count(b"\n")
            else:
                self._queued_bytes += len(piece)
                self._pieces.put(piece)
        return len(piece)

    def end(self, until: float) -> None:
        """Write queued output until a monotonic time. Later output is lost."""
        self._pieces.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        ended = False
        while not (ended and self._pieces.empty()):
            piece = self._pieces.get()
            if piece is None:
                ended = True
            else:
                self._count_written(piece, self._write_out(piece))

    def _write_out(self, piece: bytes) -> OSError | None:
        remaining = memoryview(piece)
        try:
            while remaining:
                remaining = remaining[os.write(self._number, remaining) :]
        except OSError as error:  # disk full, pipe or descriptor closed: serving goes on
            return error
        return None

    def _count_written(self, piece: bytes, error: OSError | None) -> None:
        with self._lock:
            self._queued_bytes -= len(piece)
            self._full = self._full and self._queued_bytes > 0
            if error is not None:
                self._dropped += piece.count(b"\n")
                if not self._failing:
                    self._notify(
                        f"{error.strerror}; lines are dropped until writing succeeds again"
                    )
            elif self._dropped and not self._full:
                dropped, self._dropped = self._dropped, 0
                self._notify(f"{dropped} lines were dropped")
            self._failing = error is not None

    def _notify(self, message: str) -> None:
        self._notices.write(f"{self._name}: {message}\n".encode())


@contextmanager
def queued_streams() -> Iterator[None]:
    """Queue the output printed within the block; open closed standard descriptors first.

    Else a socket could get the number of a closed descriptor, and receive standard error.
    """
    _open_closed_descriptors()
    originals = sys.stdout, sys.stderr
    sys.stderr = _queue_stream(sys.stderr, "standard error")
    sys.stdout = _queue_stream(sys.stdout, "standard output", _output_of(sys.stderr))
    queued = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = originals
        _end(queued)


def exit_now(status: int) -> NoReturn:
    """End the process at once, after up to 1 s to write the queued lines of each stream."""
    _end((sys.stdout, sys.stderr))
    os._exit(status)


def _open_closed_descriptors() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The new descriptor gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _queue_stream(stream: TextIO | None, name: str, notices: QueuedOutput | None = None) -> TextIO:
    """Return a queued stream to the same descriptor; a stream without one, as in memory, as is."""
    if stream is None:  # it was closed when Python started
        return open(os.devnull, "w")  # stays open until the process ends
    try:
        number = stream.fileno()
    except OSError:
        return stream
    output = QueuedOutput(number, name, notices)
    return io.TextIOWrapper(  # type: ignore[type-var]  # QueuedOutput has all that is used
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
