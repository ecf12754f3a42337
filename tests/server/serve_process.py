"""``roseinfer serve`` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PATIENCE = 60
"""Seconds until it must listen, or must have ended."""
CODE = """\
import sys
from roseinfer.cli.model_options import Parser
from roseinfer.server import serve as serve_command

parser = Parser()
serve_command.add_options(parser)
sys.exit(serve_command.run(parser.parse_args()))
"""


@dataclass(slots=True)
class Serving:
    process: subprocess.Popen[str]
    stderr_lines: list[str] = field(default_factory=list)
    """Lines of its standard error so far."""
    stdout_lines: list[str] = field(default_factory=list)
    """Lines of its standard output so far."""

    @property
    def url(self) -> str:
        (url,) = re.findall(r"is served at (\S+)", "".join(self.stderr_lines))
        return str(url)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(
    *options: str,
    timeout: float = PATIENCE,
    variables: Mapping[str, str] | None = None,
    before: str = "",
) -> Iterator[Serving]:
    """Start a server, wait until it listens, and kill it at the end if it still runs.

    ``before`` is code that the process runs first.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", before + CODE, "--port", "0", "--device", "cpu", *options],
        cwd=ROOT,
        env=os.environ | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = Serving(process)
    listening = threading.Event()
    threads = [
        threading.Thread(target=_collect, args=(process.stderr, server.stderr_lines, listening)),
        threading.Thread(
            target=_collect, args=(process.stdout, server.stdout_lines, threading.Event())
        ),
    ]
    for thread in threads:
        thread.start()
    try:
        assert listening.wait(timeout), server.stderr_lines
        yield server
    finally:
        process.kill()
        process.wait()
        for thread, stream in zip(threads, (process.stderr, process.stdout), strict=True):
            thread.join()
            if stream is not None:
                stream.close()


def _collect(stream: Iterable[str] | None, lines: list[str], listening: threading.Event) -> None:
    """Collect lines, so that the process never waits for a reader."""
    for line in stream or ():
        lines.append(line)
        if "print(" in line:  # last line of the message that it listens
            listening.set()
    listening.set()
