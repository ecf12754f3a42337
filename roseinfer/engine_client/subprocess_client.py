"""Subprocess client: the engine runs in a supervised process of its own."""

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

from roseinfer.engine_client.protocol import (
    EngineInfo,
    EngineStats,
    OutputDelta,
    tokenizer_transfer_error,
)
from roseinfer.errors import EngineRestarting, EngineStopped, RoseinferError
from roseinfer.terminal import interrupts_kill, print_status

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from roseinfer.guided.guide import Guide
    from roseinfer.sampling_params import SamplingParams

# Messages between the two processes: the length of a pickle, and the pickle.


_HEAD = Struct("<Q")


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Command to generate a completion of a prompt, as request ``number``."""

    number: int
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """Command to cancel requests."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class AcknowledgeUpdates:
    """Command with the number of newly read updates of each request, for flow control."""

    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class CheckGuide:
    """Command to check that the engine can follow a guide; the answer has the same number."""

    number: int
    guide: Guide


Command = AddRequest | CancelRequests | AcknowledgeUpdates | CheckGuide
"""Command of the server to the engine; a message has a list of them."""


class Heartbeat(NamedTuple):
    """Progress of the engine's thread."""

    rounds: int
    """Iterations of its loop, each with a step."""
    busy: bool
    """True if it has work. Requests that are paused, or wait for their guide, do not count."""
    stopped: str | None
    """Reason why it has stopped; None while it runs."""


class EngineReport(NamedTuple):
    """Message of the engine to the server."""

    parts: list[tuple[Any, ...]]
    """Tuples of a request's number and the arguments of its ``OutputDelta``."""
    stats: EngineStats | None
    """Stats of the engine; None if they have not changed."""
    heartbeat: Heartbeat
    answers: list[tuple[int, BaseException | None]]


def frame_message(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def receive_message(link: socket.socket) -> Any:
    """Wait for a message; raise ``EOFError`` if the other process has ended."""
    (size,) = _HEAD.unpack(_receive_exactly(link, _HEAD.size))
    return pickle.loads(_receive_exactly(link, size))


def _receive_exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


@dataclass(slots=True)
class MessageDecoder:
    """Decoder of messages from bytes that arrive in arbitrary pieces."""

    _data: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes, and yield the messages that are complete now."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            message = pickle.loads(self._data[_HEAD.size : end])
            del self._data[:end]
            yield message


# The engine's process, and the limit of its restarts.


_END_S = 2.0
"""Seconds for the process to end after the link is closed, before it is killed."""


@dataclass(slots=True, eq=False)
class EngineProcess:
    """Process that loads and runs the model, and the link to it."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    started_at: float = field(default_factory=time.monotonic)
    load_s: float = 0.0
    """Seconds until the model was loaded."""
    end_reason: str | None = None
    """Reason why the server killed it; None if it ended by itself."""

    @classmethod
    def start(cls, args: argparse.Namespace, command: str) -> EngineProcess:
        """Start a process that loads the model of the options."""
        parent_link, child_link = socket.socketpair()
        with child_link:
            try:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "roseinfer.engine_client.child",
                        str(child_link.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[child_link.fileno()],
                )
            except BaseException:
                parent_link.close()
                raise
        with suppress(OSError):  # if the process has ended, the next read fails
            parent_link.sendall(frame_message((args, command)))
        return cls(process, parent_link)

    def wait_until_loaded(self) -> EngineInfo:
        """Wait until the model is loaded, and return the properties of the engine."""
        try:
            reply = receive_message(self.link)
        except (EOFError, OSError):
            status = self.wait_exit_status()
            reason = f"the engine's process ended {status} while it loaded the model"
            raise EngineStopped(reason) from None
        except Exception as error:  # unpickling a tokenizer may raise anything
            raise tokenizer_transfer_error(error) from error
        if isinstance(reply, RoseinferError):
            raise reply
        assert isinstance(reply, EngineInfo)
        self.load_s = time.monotonic() - self.started_at
        return reply

    def wait_exit_status(self) -> str:
        """Wait for the process to end, and return its signal or exit status, in words."""
        status = self.process.wait()
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"

    def kill(self, reason: str) -> None:
        """Kill the process, and record the first reason."""
        if self.end_reason is None:
            self.end_reason = reason
            self.process.kill()

    def end(self) -> None:
        """Close the link, and wait for the process to end. Any thread may call this, repeatedly."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class RestartLimit:
    """Limit of the number and rate of restarts of an engine's process."""

    max_restarts: int = 5
    """Restarts within the window, at most."""
    window_s: float = 600.0
    delay_s: float = 1.0
    """Seconds before the second restart in the window; doubles with each further one."""
    _restart_times: list[float] = field(default_factory=list)
    """Monotonic times of the restarts in the window."""

    def next_delay(self) -> float | None:
        """Count a restart, and return the seconds before it; None if the limit is reached."""
        now = time.monotonic()
        self._restart_times = [at for at in self._restart_times if now - at < self.window_s]
        num_restarts = len(self._restart_times)
        if num_restarts >= self.max_restarts:
            return None
        self._restart_times.append(now)
        return self.delay_s * 2 ** (num_restarts - 1) if num_restarts else 0.0


_ACKNOWLEDGE_EVERY = 16
"""Newly read updates of a request that are acknowledged at once: the engine pauses a request with
many more unread updates."""
_LEAST_RETRY_S, _MAX_RETRY_S = 1, 60
"""Bounds of the seconds in ``Retry-After``; OpenAI's client ignores longer ones."""


@contextmanager
def run_engine_process(args: argparse.Namespace, command: str) -> Iterator[SubprocessClient]:
    """Load the model of the options in a new process, which ends with the block."""
    start = partial(EngineProcess.start, args, command)
    with ExitStack() as stack:
        child = start()
        stack.callback(child.link.close)
        stack.callback(child.end)
        with interrupts_kill():  # unpickled tokenizers need it; the child loads the model meanwhile
            import transformers  # noqa: F401
        engine = SubprocessClient(child, child.wait_until_loaded(), command, start)
        stack.callback(engine.close)
        yield engine


class SubprocessClient:
    """Client of an engine in a subprocess, for the tasks of one event loop.

    All methods but ``close`` run in that loop's thread. When the engine's process ends, all open
    requests fail and a new process is started. Messages of an earlier process are dropped.
    """

    separate_process = True

    def __init__(
        self,
        child: EngineProcess,
        info: EngineInfo,
        command: str,
        start: Callable[[], EngineProcess],
        limit: RestartLimit | None = None,
    ) -> None:
        """Serve by a loaded process; ``start`` starts the next. Log lines start by ``command``."""
        self.info = info
        self.stats = EngineStats.initial(info.request_limits.capacity)
        self.closed = False
        self.restarts = 0
        self._command = command
        self._start = start
        self._limit = limit or RestartLimit()
        self._starting = threading.Lock()
        """Lock held to start a process, and to set ``_closing``, which stops further starts."""
        self._closing = threading.Event()
        self._latest_process = child
        """Process that was started last; all earlier ones have ended."""
        self._child: EngineProcess | None = child
        """Process that serves; None during a restart and after the end."""
        self._ready_at = 0.0
        """Estimated monotonic time when the next process will serve, from this one's load time."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Future[None] | None = None
        self._new_stop_error: Callable[[], Exception] = partial(
            EngineStopped, "the engine was closed"
        )
        """Factory of the error for requests while no process serves."""
        self._open: dict[int, tuple[_RequestGroup, int]] = {}
        """Open requests: the group of each, and its number in the group."""
        self._pending_checks: dict[int, asyncio.Future[None]] = {}
        """Futures of guide checks, by command number."""
        self._next_number = 0
        """Latest number; not reset by restarts, so that no number means two requests."""
        self._commands: list[Command] = []
        self._sending = False
        """True if the queued commands will be sent in this iteration of the loop."""
        self._unacknowledged: dict[int, int] = {}
        """Read but unacknowledged updates of each request."""
        self._rounds = 0
        """Iterations of the engine's loop, by its last report."""
        self._progress_at = 0.0
        """Monotonic time of the last report with a new iteration, or without work."""

    @property
    def restarting(self) -> bool:
        return self._child is None and not self.closed

    @property
    def stalled_s(self) -> float:
        if self._child is None or not (self._open or self._pending_checks):
            return 0.0
        return time.monotonic() - self._progress_at

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._connect(self._latest_process)

    def open_group(self) -> _RequestGroup:
        return _RequestGroup(self)

    async def check_guide(self, guide: Guide) -> None:
        if self._child is None:
            raise self._new_stop_error()
        number = self._new_number()
        reply = self._pending_checks[number] = asyncio.get_running_loop().create_future()
        self._queue_commands(CheckGuide(number, guide))
        try:
            await reply
        finally:
            self._pending_checks.pop(number, None)

    def close(self) -> None:
        with self._starting:
            self._closing.set()
        self._call_in_loop(partial(self._stop, "the engine was closed"))
        self._latest_process.end()

    def add(
        self, group: _RequestGroup, at: int, token_ids: Sequence[int], params: SamplingParams
    ) -> int | None:
        """Queue a request, and return its number; None if it failed as no process serves."""
        if self._child is None:
            group.take(at, OutputDelta(error=self._new_stop_error()))
            return None
        number = self._new_number()
        self._open[number] = group, at
        self._queue_commands(AddRequest(number, [*token_ids], params))
        return number

    def acknowledge(self, number: int, count: int) -> None:
        """Count newly read updates of a request, so that the engine resumes it if paused."""
        if number in self._open:
            count += self._unacknowledged.get(number, 0)
            self._unacknowledged[number] = count
            if count >= _ACKNOWLEDGE_EVERY:
                self._queue_commands()

    def cancel(self, numbers: Sequence[int]) -> None:
        if open_numbers := [number for number in numbers if self._open.pop(number, None)]:
            self._queue_commands(CancelRequests(open_numbers))
            for number in open_numbers:
                self._unacknowledged.pop(number, None)

    def _new_number(self) -> int:
        """Return the number of a new command."""
        if not (self._open or self._pending_checks):
            self._progress_at = time.monotonic()
        self._next_number += 1
        return self._next_number

    def _queue_commands(self, *commands: Command) -> None:
        """Send commands and acknowledgements in one message per iteration of the event loop."""
        self._commands += commands
        if not self._sending and self._loop is not None:
            self._sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        if self._unacknowledged:
            self._commands.append(AcknowledgeUpdates(self._unacknowledged))
        commands, self._commands, self._unacknowledged = self._commands, [], {}
        self._sending = False
        if self._transport is not None and self._child is not None:
            self._transport.write(frame_message(commands))

    def handle_report(self, child: EngineProcess, report: EngineReport) -> None:
        if child is not self._child:
            return
        if report.stats is not None:
            self.stats = report.stats
        rounds, busy, stopped = report.heartbeat
        # The first round may compile kernels: it is no stall.
        if rounds != self._rounds or not (busy and rounds):
            self._rounds, self._progress_at = rounds, time.monotonic()
        if stopped is not None:
            child.kill(stopped)
        for number, *to_tuple in report.parts:
            if (entry := self._open.get(number)) is not None:  # else it was cancelled
                part = OutputDelta(*to_tuple)
                if isinstance(part.error, EngineStopped):
                    continue  # it fails when the process ends
                if part.is_final:
                    del self._open[number]
                    self._unacknowledged.pop(number, None)
                group, at = entry
                group.take(at, part)
        for number, error in report.answers:
            reply = self._pending_checks.pop(number, None)
            if reply is not None and not reply.done():
                if error is None:
                    reply.set_result(None)
                else:
                    reply.set_exception(error)

    async def _connect(self, child: EngineProcess) -> None:
        assert self._loop is not None
        await self._loop.create_unix_connection(
            partial(_ReportReceiver, self, child), sock=child.link
        )

    def begin(self, child: EngineProcess, transport: asyncio.Transport) -> None:
        """Serve by a process once its link is connected."""
        if self.closed:
            transport.abort()
            return
        self._child, self._transport = child, transport
        self._rounds, self._progress_at = 0, time.monotonic()
        watch = partial(self._watch, child)
        threading.Thread(target=watch, name="roseinfer engine", daemon=True).start()

    def _watch(self, child: EngineProcess) -> None:
        status = child.wait_exit_status()
        problem = (
            "the engine has stopped" if child.end_reason else f"the engine's process ended {status}"
        )
        self._call_in_loop(partial(self._on_process_exit, problem, child.end_reason or problem))

    def _on_process_exit(self, problem: str, reason: str) -> None:
        """Fail the open requests, and restart the process, or stop if the limit is reached.

        ``end_reason`` is for clients; the log gets ``problem``, which contains nothing of a prompt.
        """
        if self.closed:
            return
        delay = self._limit.next_delay()
        if delay is None:
            count = f"{self._limit.max_restarts} times within {self._limit.window_s:g} s"
            end = f"it was restarted {count}, which is the limit; restart the server"
            self._stop(f"{reason}: {end}")
        else:
            end = f"restarting it in {delay:g} s" if delay else "restarting it"
            self._ready_at = time.monotonic() + delay + self._latest_process.load_s
            self._new_stop_error = partial(self._restarting_error, reason)
            self._fail_open_requests()
            restart = partial(self._restart, delay)
            threading.Thread(target=restart, name="roseinfer restart", daemon=True).start()
        print_status(f"{self._command}: {problem}: {end}")

    def _restarting_error(self, reason: str) -> EngineRestarting:
        seconds = ceil(self._ready_at - time.monotonic())
        retry_after = max(_LEAST_RETRY_S, min(seconds, _MAX_RETRY_S))
        message = f"{reason}: it is restarting; try again later"
        return EngineRestarting(message, retry_after=retry_after)

    def _restart(self, delay: float) -> None:
        """Start a process after a delay, and serve by it when the model is loaded."""
        if self._closing.wait(delay):
            return
        load_s = self._latest_process.load_s
        try:
            with self._starting:
                if self._closing.is_set():
                    return
                self.restarts += 1
                child = self._latest_process = self._start()
            child.load_s = load_s  # an estimate, until it has loaded
            child.wait_until_loaded()  # the result is dropped: it equals that of the first process
        except Exception as error:  # after any error, no client may wait forever
            self._latest_process.end()
            self._latest_process.link.close()
            self._call_in_loop(partial(self._on_process_exit, str(error), str(error)))
        else:
            self._call_in_loop(partial(self._switch_to, child))

    def _switch_to(self, child: EngineProcess) -> None:
        if self.closed:
            child.link.close()
        else:
            self._connecting = asyncio.ensure_future(self._connect(child))

    def _call_in_loop(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    def _stop(self, reason: str) -> None:
        """Fail all open and future requests."""
        if not self.closed:
            self.closed = True
            self._new_stop_error = partial(EngineStopped, reason)
            self._fail_open_requests()

    def _fail_open_requests(self) -> None:
        """Fail all open requests and checks, and drop unsent commands."""
        self._child = None
        self.stats = EngineStats.initial(self.stats.blocks)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._commands, self._unacknowledged = [], {}
        waiting, self._open = self._open, {}
        for group, at in waiting.values():
            group.take(at, OutputDelta(error=self._new_stop_error()))
        for reply in self._pending_checks.values():
            if not reply.done():
                reply.set_exception(self._new_stop_error())


class _ReportReceiver(asyncio.Protocol):
    def __init__(self, engine: SubprocessClient, child: EngineProcess) -> None:
        self._engine = engine
        self._child = child
        self._frames = MessageDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast is needed for uvloop, whose transports are no subclass.
        self._engine.begin(self._child, cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        for report in self._frames.feed(data):
            self._engine.handle_report(self._child, report)


class _RequestGroup:
    def __init__(self, engine: SubprocessClient) -> None:
        self._engine = engine
        self._numbers: list[int | None] = []
        """Number of each request for the engine; None if it failed at once."""
        self._parts: dict[int, OutputDelta] = {}
        self._has_output = asyncio.Event()

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        at = len(self._numbers)
        self._numbers.append(None)
        self._numbers[at] = self._engine.add(self, at, token_ids, params)

    async def next(self) -> list[tuple[int, OutputDelta]]:
        await self._has_output.wait()
        self._has_output.clear()
        parts, self._parts = self._parts, {}
        for at, part in parts.items():
            if (number := self._numbers[at]) is not None and not part.is_final:
                self._engine.acknowledge(number, part.count)
        return [*parts.items()]

    def cancel(self) -> None:
        self._engine.cancel([number for number in self._numbers if number is not None])

    def take(self, at: int, part: OutputDelta) -> None:
        """Merge new output of a request until ``next`` returns it."""
        if at in self._parts:
            self._parts[at].extend(part)
        else:
            self._parts[at] = part
        self._has_output.set()
