"""Queued output: a reader that does not read makes printing neither wait nor fail."""

from __future__ import annotations

import errno
import io
import os
import select
import subprocess
import sys
import threading
import time
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from roseinfer.engine_client.standard_streams import MAX_QUEUED_BYTES, QueuedOutput, queued_streams
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINE = b"x" * 999 + b"\n"
PATIENCE = 30


class Pipe:
    """Pipe with an output that writes to it."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.output = QueuedOutput(self.writing, "a log")
        self._rest = b""

    def lines(self, count: int) -> list[bytes]:
        """Read this many lines."""
        while self._rest.count(b"\n") < count:
            assert select.select([self.reading], [], [], PATIENCE)[0], (
                "timed out: expected more lines"
            )
            self._rest += os.read(self.reading, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n", count)
        return [line + b"\n" for line in lines]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reading)
    pipe.output.end(time.monotonic() + PATIENCE)
    os.close(pipe.writing)


def test_unread_pipe_does_not_block_and_dropped_lines_are_counted(pipe: Pipe) -> None:
    count = 3 * MAX_QUEUED_BYTES // len(LINE)
    for _ in range(count):
        assert pipe.output.write(LINE) == len(LINE)
    assert pipe.output._queued_bytes <= MAX_QUEUED_BYTES
    num_kept = count - pipe.output._dropped
    assert 0 < num_kept < count
    assert pipe.lines(20) == [LINE] * 20
    for _ in range(count):  # the reader is slow, and its gap does not end
        pipe.output.write(LINE)
    assert pipe.output._dropped == 2 * count - num_kept
    num_kept, count = num_kept - 20, 2 * count - 20
    assert pipe.lines(num_kept + 1) == [LINE] * num_kept + [
        b"a log: %d lines were dropped\n" % (count - num_kept)
    ]
    pipe.output.write(b"later\n")
    assert pipe.lines(1) == [b"later\n"]


def test_queued_lines_are_written_at_the_end(pipe: Pipe) -> None:
    count = 200_000 // len(LINE)  # more than a pipe holds
    for _ in range(count):
        pipe.output.write(LINE)
    reader = threading.Thread(target=lambda: lines_read.extend(pipe.lines(count)))
    lines_read: list[bytes] = []
    reader.start()
    pipe.output.end(time.monotonic() + PATIENCE)
    reader.join(PATIENCE)
    assert lines_read == [LINE] * count


def test_end_does_not_wait_for_a_reader(pipe: Pipe) -> None:
    pipe.output.write(LINE * 200)
    pipe.output.end(time.monotonic() + 0.05)
    assert pipe.output._queued_bytes


def test_write_failures_are_reported_by_another_output(pipe: Pipe, tmp_path: Path) -> None:
    """One message when writing starts to fail, and the number of lines when it succeeds again."""
    number = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT)  # so that writing is EBADF
    output = QueuedOutput(number, "output", pipe.output)
    for _ in range(5):
        output.write(b"lost\n")
    reason = os.strerror(errno.EBADF).encode()
    message = b"output: %s; lines are dropped until writing succeeds again\n" % reason
    assert pipe.lines(1) == [message]
    end = time.monotonic() + PATIENCE
    while output._dropped < 5:
        assert time.monotonic() < end
        time.sleep(0.001)
    writable = os.open(tmp_path / "log", os.O_WRONLY)
    os.dup2(writable, number)
    output.write(b"kept\n")
    assert pipe.lines(1) == [b"output: 5 lines were dropped\n"]
    output.end(time.monotonic() + PATIENCE)
    assert (tmp_path / "log").read_bytes() == b"kept\n"
    os.close(writable)
    os.close(number)


def test_memory_streams_are_kept_and_others_restored(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", memory := io.StringIO())
    stderr = sys.stderr
    with queued_streams():
        assert sys.stdout is memory
        assert sys.stderr is not stderr
        assert sys.stderr.isatty() == stderr.isatty()
        print("half", end="", file=sys.stderr, flush=True)
        print(" and half \udcff", file=sys.stderr)
    assert sys.stderr is stderr
    assert capfd.readouterr().err == "half and half \\udcff\n"


def test_line_is_written_without_a_flush(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(os.dup(pipe.writing), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with queued_streams():
            print("a line", file=sys.stderr)
            assert pipe.lines(1) == [b"a line\n"]


def test_warnings_and_default_loggers_are_queued() -> None:
    """``logging`` resolves standard error when it writes."""
    code = """
        import logging, warnings
        from roseinfer.engine_client.standard_streams import queued_streams
        with queued_streams():
            for number in range(400):
                logging.getLogger("uvicorn.error").error("x" * 999)
                warnings.warn("x" * 999 + str(number))
    """
    reading, writing = os.pipe()
    process = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        cwd=ROOT,
        stderr=writing,
        timeout=PATIENCE,
        check=False,
    )
    os.close(writing)
    os.close(reading)
    assert process.returncode == 0


def test_closed_descriptors_are_opened_before_sockets() -> None:
    code = (
        "import os, socket, sys\n"
        "from roseinfer.engine_client.standard_streams import queued_streams\n"
        "with queued_streams():\n"
        "    pair = socket.socketpair()\n"
        "    print('to nobody')\n"
        "    print('to nobody', file=sys.stderr)\n"
        "    places = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]\n"
        "    inherited = [os.get_inheritable(number) for number in range(3)]\n"
        "    good = places == ['/dev/null'] * 3 and all(inherited)\n"
        "sys.exit(7 if good and min(each.fileno() for each in pair) > 2 else 1)\n"
    )
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    process = subprocess.run(
        ["sh", "-c", command, sys.executable, code], cwd=ROOT, timeout=PATIENCE, check=False
    )
    assert process.returncode == 7
