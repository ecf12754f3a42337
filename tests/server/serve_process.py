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
"""Seconds within which it listens, and ends."""
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
    said: list[str] = field(default_factory=list)
    """What it wrote to its standard error so far, line by line."""
    logged: list[str] = field(default_factory=list)
    """The same of its standard output."""

    @property
    def url(self) -> str:
        (url,) = re.findall(r"is served at (\S+)", "".join(self.said))
        return str(url)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(
    *options: str,
    patience: float = PATIENCE,
    variables: Mapping[str, str] | None = None,
    before: str = "",
) -> Iterator[Serving]:
    """Start a server, wait until it listens, and kill it in the end if it still runs.

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
    found = Serving(process)
    listening = threading.Event()
    threads = [
        threading.Thread(target=_keep, args=(process.stderr, found.said, listening)),
        threading.Thread(target=_keep, args=(process.stdout, found.logged, threading.Event())),
    ]
    for thread in threads:
        thread.start()
    try:
        assert listening.wait(patience), found.said
        yield found
    finally:
        process.kill()
        process.wait()
        for thread, stream in zip(threads, (process.stderr, process.stdout), strict=True):
            thread.join()
            if stream is not None:
                stream.close()


def _keep(stream: Iterable[str] | None, lines: list[str], listening: threading.Event) -> None:
    """Keep what comes, so that the process never waits for a reader."""
    for line in stream or ():
        lines.append(line)
        if "print(" in line:  # the last of what it says when it listens
            listening.set()
    listening.set()
