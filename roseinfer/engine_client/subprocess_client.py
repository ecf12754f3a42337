"""An engine in a process of its own, which serves the tasks of one loop and is supervised."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from roseinfer.engine_client.protocol import Facts, Figures, Part, tokenizer_stays
from roseinfer.errors import EngineRestarting, EngineStopped, RoseinferError
from roseinfer.interrupts import interrupts_kill
from roseinfer.progress import say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from roseinfer.guided.guide import Guide
    from roseinfer.sampling_params import SamplingParams

# What the two processes tell each other: messages, each of them pickled with its length before.


_HEAD = Struct("<Q")


@dataclass(frozen=True, slots=True)
class Add:
    """Have a prompt continued, as text number so and so."""

    number: int
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Leave:
    """Cancel texts."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class Taken:
    """So many updates of each text were read, beside those that were told before."""

    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class CheckGuide:
    """Say whether a guide can be followed, in the answer of that number."""

    number: int
    guide: Guide


Order = Add | Leave | Taken | CheckGuide
"""What the server tells the engine; a message has a list of them."""


class Pulse(NamedTuple):
    """How the engine's thread gets on."""

    rounds: int
    """Rounds of its loop, each with a step."""
    busy: bool
    """True if it has something to do. Texts that are paused, or wait for their guide, are not."""
    stopped: str | None
    """Reason why it serves nothing any more; None while it runs."""


class Report(NamedTuple):
    """What the engine tells the server."""

    parts: list[tuple[Any, ...]]
    """Each the number of a text, and a part of it that is packed."""
    figures: Figures | None
    """None where they have not changed."""
    pulse: Pulse
    answers: list[tuple[int, BaseException | None]]


def framed(what: object) -> bytes:
    data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def receive(link: socket.socket) -> Any:
    """Wait for a message, and raise ``EOFError`` where the other side has ended."""
    (size,) = _HEAD.unpack(_exactly(link, _HEAD.size))
    return pickle.loads(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


@dataclass(slots=True)
class Frames:
    """Messages out of bytes that come in any pieces."""

    _data: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are whole now."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            message = pickle.loads(self._data[_HEAD.size : end])
            del self._data[:end]
            yield message


# One process of an engine, from its start to its end, and how often a new one may follow.


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
                    [sys.executable, "-m", "roseinfer.engine_client.child", str(theirs.fileno())],
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


_UNTOLD = 16
"""What was read is told when it is so much of any text. One with many more unread is paused."""
_LEAST_RETRY_S, _MOST_RETRY_S = 1, 60
"""Bounds of the time after which clients are told to retry; OpenAI's heeds no longer one."""


@contextmanager
def running(args: argparse.Namespace, command: str) -> Iterator[OtherProcess]:
    """Load a model in a new process, as options say, and have it end with the block."""
    start = partial(EngineChild.start, args, command)
    with ExitStack() as stack:
        child = start()
        stack.callback(child.link.close)
        stack.callback(child.end)
        with interrupts_kill():  # tokenizers need it, and the other process is busy meanwhile
            import transformers  # noqa: F401
        engine = OtherProcess(child, child.loaded(), command, start)
        stack.callback(engine.close)
        yield engine


class OtherProcess:
    """Serves the tasks of one loop, all in that loop's thread but ``close``.

    When the process of the engine ends, everything open ends with an error and a new process is
    started. What comes from an earlier process is dropped.
    """

    apart = True

    def __init__(
        self,
        child: EngineChild,
        facts: Facts,
        command: str,
        start: Callable[[], EngineChild],
        limit: RestartLimit | None = None,
    ) -> None:
        """``command`` is in whose name it says that a process has ended. ``start`` starts one."""
        self.facts = facts
        self.figures = Figures.at_first(facts.room.capacity)
        self.closed = False
        self.restarts = 0
        self._command = command
        self._start = start
        self._limit = limit or RestartLimit()
        self._starting = threading.Lock()
        """Held where a process is started, and where it is said that none shall be any more."""
        self._closing = threading.Event()
        self._newest = child
        """The process that was started last: an earlier one has ended."""
        self._child: EngineChild | None = child
        """The process that serves; None while there is none."""
        self._ready_at = 0.0
        """Monotonic time at which the next process will serve, if it loads as fast as this one."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Future[None] | None = None
        self._why: Callable[[], Exception] = partial(EngineStopped, "the engine was closed")
        """Makes the error of whatever is asked for while no process serves."""
        self._open: dict[int, tuple[_Texts, int]] = {}
        """Who waits for a text, and the number it has there."""
        self._asked: dict[int, asyncio.Future[None]] = {}
        """Who waits for an answer."""
        self._next_number = 0
        """Counts on when a new process is started, so that no number means two texts."""
        self._due: list[Order] = []
        self._sending = False
        """True if what is due will be sent before the loop goes on."""
        self._taken: dict[int, int] = {}
        """What was read of each text and not told yet."""
        self._rounds = 0
        """Rounds that the engine had done when it reported last."""
        self._progress_at = 0.0
        """Monotonic time at which it had done another, or had nothing to do."""

    @property
    def restarting(self) -> bool:
        return self._child is None and not self.closed

    @property
    def stalled_s(self) -> float:
        if self._child is None or not (self._open or self._asked):
            return 0.0
        return time.monotonic() - self._progress_at

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._connect(self._newest)

    def texts(self) -> _Texts:
        return _Texts(self)

    async def check_guide(self, guide: Guide) -> None:
        if self._child is None:
            raise self._why()
        number = self._new_number()
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._tell(CheckGuide(number, guide))
        try:
            await answer
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        with self._starting:
            self._closing.set()
        self._in_loop(partial(self._stop, "the engine was closed"))
        self._newest.end()

    def add(
        self, texts: _Texts, at: int, token_ids: Sequence[int], params: SamplingParams
    ) -> int | None:
        """Have a prompt continued, and return the number of its text here, if it has begun."""
        if self._child is None:
            texts.take(at, Part(error=self._why()))
            return None
        number = self._new_number()
        self._open[number] = texts, at
        self._tell(Add(number, [*token_ids], params))
        return number

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

    def _new_number(self) -> int:
        """Return the number of something new to do."""
        if not (self._open or self._asked):
            self._progress_at = time.monotonic()
        self._next_number += 1
        return self._next_number

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
        if self._transport is not None and self._child is not None:
            self._transport.write(framed(orders))

    def hear(self, child: EngineChild, report: Report) -> None:
        if child is not self._child:
            return
        if report.figures is not None:
            self.figures = report.figures
        rounds, busy, stopped = report.pulse
        if rounds != self._rounds or not (busy and rounds):  # the first may compile kernels
            self._rounds, self._progress_at = rounds, time.monotonic()
        if stopped is not None:
            child.give_up(stopped)
        for number, *packed in report.parts:
            if (waits := self._open.get(number)) is not None:  # else it was left
                part = Part(*packed)
                if isinstance(part.error, EngineStopped):
                    continue  # it ends when the process has
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

    async def _connect(self, child: EngineChild) -> None:
        assert self._loop is not None
        await self._loop.create_unix_connection(partial(_Hearing, self, child), sock=child.link)

    def begin(self, child: EngineChild, transport: asyncio.Transport) -> None:
        """Serve by a process, of which nothing was read yet."""
        if self.closed:
            transport.abort()
            return
        self._child, self._transport = child, transport
        self._rounds, self._progress_at = 0, time.monotonic()
        watch = partial(self._watch, child)
        threading.Thread(target=watch, name="roseinfer engine", daemon=True).start()

    def _watch(self, child: EngineChild) -> None:
        how = child.how_it_ended()
        what = (
            "the engine has stopped" if child.why else f"the process of the engine has ended {how}"
        )
        self._in_loop(partial(self._lose, what, child.why or what))

    def _lose(self, what: str, why: str) -> None:
        """End everything open with an error, and have a process started, unless too many were.

        ``why`` is for clients; the log gets ``what``, which has no word of a prompt.
        """
        if self.closed:
            return
        delay = self._limit.next_delay()
        if delay is None:
            often = f"{self._limit.most} times within {self._limit.within_s:g} s"
            end = f"it was started again {often}, which is the limit: restart the server"
            self._stop(f"{why}: {end}")
        else:
            end = f"starting it again in {delay:g} s" if delay else "starting it again"
            self._ready_at = time.monotonic() + delay + self._newest.load_s
            self._why = partial(self._restarting_error, why)
            self._end_open()
            restart = partial(self._restart, delay)
            threading.Thread(target=restart, name="roseinfer restart", daemon=True).start()
        say(f"{self._command}: {what}: {end}")

    def _restarting_error(self, why: str) -> EngineRestarting:
        seconds = ceil(self._ready_at - time.monotonic())
        retry_after = max(_LEAST_RETRY_S, min(seconds, _MOST_RETRY_S))
        return EngineRestarting(f"{why}: it is started again", retry_after=retry_after)

    def _restart(self, delay: float) -> None:
        """Start a process after a delay, and have it serve when the model is loaded."""
        if self._closing.wait(delay):
            return
        load_s = self._newest.load_s
        try:
            with self._starting:
                if self._closing.is_set():
                    return
                self.restarts += 1
                child = self._newest = self._start()
            child.load_s = load_s  # as long as it has not loaded itself
            child.loaded()  # prompts are checked by what is known of the first
        except Exception as error:  # whatever it is, nobody may wait for ever
            self._newest.end()
            self._newest.link.close()
            self._in_loop(partial(self._lose, str(error), str(error)))
        else:
            self._in_loop(partial(self._serve_by, child))

    def _serve_by(self, child: EngineChild) -> None:
        if self.closed:
            child.link.close()
        else:
            self._connecting = asyncio.ensure_future(self._connect(child))

    def _in_loop(self, what: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has been closed before
            if self._loop is not None:
                self._loop.call_soon_threadsafe(what)

    def _stop(self, why: str) -> None:
        """Serve nothing any more."""
        if not self.closed:
            self.closed = True
            self._why = partial(EngineStopped, why)
            self._end_open()

    def _end_open(self) -> None:
        """End everything that waits with an error, and forget what was to be sent."""
        self._child = None
        self.figures = Figures.at_first(self.figures.blocks)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._due, self._taken = [], {}
        waiting, self._open = self._open, {}
        for texts, at in waiting.values():
            texts.take(at, Part(error=self._why()))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self._why())


class _Hearing(asyncio.Protocol):
    def __init__(self, engine: OtherProcess, child: EngineChild) -> None:
        self._engine = engine
        self._child = child
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._engine.begin(self._child, cast("asyncio.Transport", transport))  # uvloop's is none

    def data_received(self, data: bytes) -> None:
        for report in self._frames.feed(data):
            self._engine.hear(self._child, report)


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
