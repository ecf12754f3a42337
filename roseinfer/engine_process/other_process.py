"""An engine in a process of its own: starting it, and serving the tasks of one loop by it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.engine_process.any_process import Facts, Figures
from roseinfer.engine_process.part import Part
from roseinfer.engine_process.portable import tokenizer_stays
from roseinfer.engine_process.wire import (
    Add,
    CheckGuide,
    Frames,
    Leave,
    Order,
    Report,
    Taken,
    framed,
    receive,
)
from roseinfer.errors import EngineStopped, RoseinferError
from roseinfer.how_far import say
from roseinfer.interrupts import interrupts_kill

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from roseinfer.guided.guide import Guide
    from roseinfer.sampling_params import SamplingParams

_END_S = 2.0
"""So long the process may take to end when the link is closed."""
_UNTOLD = 16
"""What was read is told when it is so much of any text. One with many more unread is paused."""


@contextmanager
def running(args: argparse.Namespace, command: str) -> Iterator[OtherProcess]:
    """Load a model in a new process, as options say, and have it end with the block."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "roseinfer.engine_process.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        try:
            ours.sendall(framed((args, command)))
            with interrupts_kill():  # tokenizers need it, and the other process is busy meanwhile
                import transformers  # noqa: F401
            yield OtherProcess(process, ours, _loaded(process, ours), command)
        finally:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            _end(process)


def _loaded(process: subprocess.Popen[bytes], link: socket.socket) -> Facts:
    """Wait until the model is there, and return what is to be known of it."""
    try:
        said = receive(link)
    except (EOFError, OSError):
        how = _how(process.wait())
        raise EngineStopped(f"the process of the engine ended {how} as it loaded") from None
    except Exception as error:  # whatever a tokenizer's class does where it is made again
        raise tokenizer_stays(error) from error
    if isinstance(said, RoseinferError):
        raise said
    assert isinstance(said, Facts)
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


class OtherProcess:
    """Serves the tasks of one loop, all in that loop's thread but ``close``."""

    apart = True

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        link: socket.socket,
        facts: Facts,
        command: str,
    ) -> None:
        """``command`` is in whose name it says that the process has ended."""
        self.facts = facts
        self.figures = Figures.at_first(facts.room.capacity)
        self._stopped = False
        """True if the engine serves nothing any more. Its process says why."""
        self._ended = False
        """True if there is no process to be asked."""
        self._command = command
        self._process = process
        self._link = link
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None
        self._why: Callable[[], Exception] = partial(EngineStopped, "the engine was closed")
        self._open: dict[int, tuple[_Texts, int]] = {}
        """Who waits for a text, and the number it has there."""
        self._asked: dict[int, asyncio.Future[None]] = {}
        """Who waits for an answer."""
        self._next_number = 0
        self._due: list[Order] = []
        self._sending = False
        """True if what is due will be sent before the loop goes on."""
        self._taken: dict[int, int] = {}
        """What was read of each text and not told yet."""

    @property
    def closed(self) -> bool:
        return self._stopped or self._ended

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport, _ = await self._loop.create_unix_connection(
            partial(_Hearing, self._hear), sock=self._link
        )
        watching = threading.Thread(target=self._watch, name="roseinfer engine", daemon=True)
        watching.start()

    def texts(self) -> _Texts:
        return _Texts(self)

    async def check_guide(self, guide: Guide) -> None:
        if self._ended:
            raise self._why()
        self._next_number += 1
        number = self._next_number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._tell(CheckGuide(number, guide))
        try:
            await answer
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)
        _end(self._process)

    def add(
        self, texts: _Texts, at: int, token_ids: Sequence[int], params: SamplingParams
    ) -> int | None:
        """Have a prompt continued, and return the number of its text here, if it has begun."""
        if self._ended:
            texts.take(at, Part(error=self._why()))
            return None
        self._next_number += 1
        self._open[self._next_number] = texts, at
        self._tell(Add(self._next_number, [*token_ids], params))
        return self._next_number

    def note_taken(self, number: int, count: int) -> None:
        """Count what was read of a text, so that it goes on if it was paused."""
        if number in self._open:
            count += self._taken.get(number, 0)
            self._taken[number] = count
            if count >= _UNTOLD:
                self._tell()

    def leave(self, numbers: Sequence[int]) -> None:
        if left := [number for number in numbers if self._open.pop(number, None)]:
            self._tell(Leave(left))
            for number in left:
                self._taken.pop(number, None)

    def _tell(self, *orders: Order) -> None:
        """Send orders, and what was read, together with what else comes before the loop goes on."""
        self._due += orders
        if not self._sending and self._loop is not None:
            self._sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        if self._taken:
            self._due.append(Taken(self._taken))
        orders, self._due, self._taken = self._due, [], {}
        self._sending = False
        if self._transport is not None and not self._ended:
            self._transport.write(framed(orders))

    def _hear(self, report: Report) -> None:
        if report.figures is not None:
            self.figures = report.figures
        self._stopped = report.stopped
        for number, *packed in report.parts:
            if (waits := self._open.get(number)) is not None:  # else it was left
                part = Part(*packed)
                if part.last:
                    del self._open[number]
                    self._taken.pop(number, None)
                texts, at = waits
                texts.take(at, part)
        for number, error in report.answers:
            answer = self._asked.pop(number, None)
            if answer is not None and not answer.done():
                if error is None:
                    answer.set_result(None)
                else:
                    answer.set_exception(error)

    def _watch(self) -> None:
        status = self._process.wait()
        with suppress(RuntimeError):  # the loop has been closed before
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._lose, status)

    def _lose(self, status: int) -> None:
        if not self._ended:
            why = f"the process of the engine has ended {_how(status)}"
            self._why = partial(EngineStopped, why)
            self._stop()
            say(f"{self._command}: {why}")

    def _stop(self) -> None:
        """End all that waits with an error."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()
        waiting, self._open = self._open, {}
        for texts, at in waiting.values():
            texts.take(at, Part(error=self._why()))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self._why())


class _Hearing(asyncio.Protocol):
    def __init__(self, hear: Callable[[Report], None]) -> None:
        self._hear = hear
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for report in self._frames.feed(data):
            self._hear(report)


class _Texts:
    def __init__(self, engine: OtherProcess) -> None:
        self._engine = engine
        self._numbers: list[int | None] = []
        """What the texts are called by the engine; None for those that never began."""
        self._parts: dict[int, Part] = {}
        self._came = asyncio.Event()

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        at = len(self._numbers)
        self._numbers.append(None)
        self._numbers[at] = self._engine.add(self, at, token_ids, params)

    async def next(self) -> list[tuple[int, Part]]:
        await self._came.wait()
        self._came.clear()
        parts, self._parts = self._parts, {}
        for at, part in parts.items():
            if (number := self._numbers[at]) is not None and not part.last:
                self._engine.note_taken(number, part.count)
        return [*parts.items()]

    def leave(self) -> None:
        self._engine.leave([number for number in self._numbers if number is not None])

    def take(self, at: int, part: Part) -> None:
        """Keep what came until it is asked for."""
        if at in self._parts:
            self._parts[at].extend(part)
        else:
            self._parts[at] = part
        self._came.set()
