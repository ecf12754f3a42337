"""Engine subprocess: loads the model, and executes the commands of the server's process.

It ends when the server's process ends in any way, since the link between them closes then.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from roseinfer.cli.model_options import load_llm
from roseinfer.engine_client.protocol import (
    MAX_GUIDE_CHECKS,
    EngineInfo,
    EngineStats,
    OutputDelta,
    to_picklable_error,
    tokenizer_transfer_error,
)
from roseinfer.engine_client.standard_streams import exit_now, queued_streams
from roseinfer.engine_client.subprocess_client import (
    AcknowledgeUpdates,
    AddRequest,
    CancelRequests,
    CheckGuide,
    Command,
    EngineReport,
    Heartbeat,
    frame_message,
    receive_message,
)
from roseinfer.engine_thread import Listener
from roseinfer.errors import RoseinferError
from roseinfer.garbage import freeze_gc
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.engine.engine import Engine
    from roseinfer.engine_thread import Delivery
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM

# Reports to the server: a thread merges the output of steps, and sends it in one message.


_MAX_UNBATCHED = 4
"""Most open requests whose output is sent immediately."""
_MIN_SEND_INTERVAL_S, _MAX_SEND_INTERVAL_S = 0.005, 0.03
"""Bounds of the seconds between two messages with more open requests. The interval grows with
their number, since each part of a message takes time on both sides."""
_MAX_OUTPUTS_PER_S = 10_000
_STATS_POLL_S = 0.05
"""Seconds between two polls of the stats, while they may change without new output."""
_HEARTBEAT_S = 0.5
"""Seconds between two messages, at most: they show that this process runs."""


@dataclass(slots=True, eq=False)
class RemoteListener(Listener):
    """Listener for a request of the server's process."""

    number: int = 0
    part: OutputDelta | None = None
    """Output that is not sent yet; None without any."""
    has_begun: bool = False
    """True once the part with the stats of its prefill was made."""


class ReportSender:
    """Inbox of the listeners for requests of the server's process; open as long as this process.

    The engine's thread adds the output of a step to the parts of its requests, and the thread of
    this class sends them. Passing every token between the threads would cost more: each thread
    would free objects that the other allocated.
    """

    is_closed = False

    def __init__(
        self, link: socket.socket, engine: Engine, heartbeat: Callable[[], Heartbeat]
    ) -> None:
        self.open: dict[int, Listener] = {}
        """Listeners by number, of the requests that have neither ended nor been cancelled."""
        self._link = link
        self._engine = engine
        self._heartbeat = heartbeat
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._listeners_with_parts: list[RemoteListener] = []
        """Listeners that have a part."""
        self._merging = threading.Lock()
        """Lock of the parts: held to add to them, and to take them for sending."""
        self._last_sent: tuple[EngineStats, str | None] | None = None
        """Stats sent last, and the reason why the engine had stopped; None before the first."""
        self._sent_at = 0.0
        self._nothing_pending = False
        """True if the stats cannot change before the next wake-up."""
        threading.Thread(target=self._run, name="roseinfer outbox", daemon=True).start()

    def put(self, deliveries: Sequence[Delivery]) -> bool:
        """Add updates to the parts of their requests. This is the only work per token here."""
        with self._merging:
            listeners = self._listeners_with_parts
            idle = not listeners
            for listener, update in deliveries:
                assert type(listener) is RemoteListener
                if (part := listener.part) is None:
                    part = listener.part = OutputDelta()
                    listeners.append(listener)
                if isinstance(update, BaseException):
                    part.count += 1
                    part.error = update
                else:
                    part.add(update)
                    if not listener.has_begun and part.tokens:
                        listener.has_begun = True
                        part.set_prefill_stats(update.request)
        if idle:
            self._wake.put(None)
        return True

    def wake(self) -> None:
        """Wake up the sender to poll the stats: a command may change them."""
        self._wake.put(None)

    def answer(self, number: int, error: BaseException | None) -> None:
        self._answers.put((number, None if error is None else to_picklable_error(error)))
        self.wake()

    def _run(self) -> None:
        try:
            while True:
                self._wait()
                self._send()
        except OSError:
            exit_now(0)  # the server has ended
        except BaseException:  # after any error, no stream may wait forever
            traceback.print_exc()
            exit_now(1)

    def _wait(self) -> None:
        """Wait for something to send; with many open requests, wait longer to merge more."""
        try:
            self._wake.get(timeout=_HEARTBEAT_S if self._nothing_pending else _STATS_POLL_S)
        except Empty:
            return
        if (num_open := len(self.open)) > _MAX_UNBATCHED:
            interval = min(
                max(_MIN_SEND_INTERVAL_S, num_open / _MAX_OUTPUTS_PER_S), _MAX_SEND_INTERVAL_S
            )
            time.sleep(max(0.0, self._sent_at + interval - time.monotonic()))

    def _send(self) -> None:
        for _ in range(self._wake.qsize()):
            self._wake.get()
        with self._merging:
            listeners, self._listeners_with_parts = self._listeners_with_parts, []
            parts = [listener.part for listener in listeners]
            for listener in listeners:
                listener.part = None
        parts_to_send: list[tuple[Any, ...]] = []
        for listener, part in zip(listeners, parts, strict=True):
            assert part is not None
            if part.is_final:
                self.open.pop(listener.number, None)
                part.error = None if part.error is None else to_picklable_error(part.error)
            parts_to_send.append((listener.number, *part.to_tuple()))
        stats, heartbeat = EngineStats.of(self._engine), self._heartbeat()
        changed = (stats, heartbeat.stopped) != self._last_sent
        self._nothing_pending = not (changed or self.open or stats.running or stats.waiting)
        answers = [self._answers.get() for _ in range(self._answers.qsize())]
        now = time.monotonic()
        if parts_to_send or answers or changed or now - self._sent_at >= _HEARTBEAT_S:
            self._sent_at = now
            report = EngineReport(parts_to_send, stats if changed else None, heartbeat, answers)
            self._link.sendall(frame_message(report))
            self._last_sent = stats, heartbeat.stopped


class _CommandHandler:
    """Executor of commands, called by the thread that receives them."""

    def __init__(self, llm: LLM, link: socket.socket) -> None:
        # Imported here: it needs torch, which is not loaded before.
        from roseinfer.engine_thread import EngineThread

        self._new_listener = RemoteListener
        self._engine = llm.engine
        self._thread = EngineThread(llm)
        self._sender = ReportSender(link, llm.engine, self._heartbeat)
        self._listeners: dict[int, RemoteListener] = {}
        self._guide_submitter = ThreadPoolExecutor(1, "roseinfer-guides")
        """Thread that submits requests with guides, in order."""
        self._checks = ThreadPoolExecutor(MAX_GUIDE_CHECKS, "roseinfer-checks")
        self._cancelling = threading.Lock()
        """Lock held to cancel a request, and to submit one that may be cancelled meanwhile."""

    def _heartbeat(self) -> Heartbeat:
        thread = self._thread
        return Heartbeat(thread.num_iterations, thread.busy, thread.stop_reason)

    def do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case AddRequest(number, token_ids, params):
                    self._add(number, token_ids, params)
                case AcknowledgeUpdates(counts):
                    for number, count in counts.items():
                        if (listener := self._sender.open.get(number)) is not None:
                            self._thread.acknowledge(listener, count)
                case CancelRequests(numbers):
                    self._cancel(numbers)
                case CheckGuide(number, guide):
                    self._checks.submit(self._check, number, guide)
        self._sender.wake()

    def _add(self, number: int, token_ids: list[int], params: SamplingParams) -> None:
        listener = self._new_listener(self._sender, number=number)
        self._sender.open[number] = listener
        if params.guide is None:
            self._submit(listener, token_ids, params)
        else:  # its preparation takes time, in which other requests must not wait
            self._guide_submitter.submit(self._submit, listener, token_ids, params)

    def _submit(
        self, listener: RemoteListener, token_ids: list[int], params: SamplingParams
    ) -> None:
        try:
            text, guide = (
                self._engine.new_completion_text(params),
                self._engine.new_guide_matcher(params),
            )
            with self._cancelling:
                if listener.number in self._sender.open:
                    self._thread.submit(listener, token_ids, params, text, guide)
        except BaseException as error:  # after any error, only this request fails
            self._sender.put([(listener, error)])

    def _cancel(self, numbers: list[int]) -> None:
        with self._cancelling:
            for number in numbers:
                if (listener := self._sender.open.pop(number, None)) is not None:
                    self._thread.cancel(listener)

    def _check(self, number: int, guide: Guide) -> None:
        try:
            self._engine.new_guide_matcher(SamplingParams(guide=guide))
        except BaseException as error:  # after any error, the caller must not wait forever
            self._sender.answer(number, error)
        else:
            self._sender.answer(number, None)


def _receive_commands(link: socket.socket, handlers: SimpleQueue[_CommandHandler]) -> None:
    """Execute the server's commands until it ends, and end this process at once then."""
    try:
        # The server sends none before it knows that the model is loaded.
        commands = receive_message(link)
        handler = handlers.get()
        while True:
            handler.do(commands)
            commands = receive_message(link)
    except (EOFError, OSError):
        exit_now(0)


def _frame_info(info: EngineInfo) -> bytes:
    try:
        return frame_message(info)
    except Exception as error:  # a tokenizer may hold anything
        raise tokenizer_transfer_error(error) from error


def main(number: int) -> int:
    """Serve the process at the other end of the socket whose descriptor is ``number``."""
    with queued_streams():
        return _serve(number)


def _serve(number: int) -> int:
    # A terminal's Ctrl-C, and the SIGTERM of a service manager, go to all processes: the server
    # drains, and this process must serve it meanwhile.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    link = socket.socket(fileno=number)
    os.set_inheritable(number, False)  # else child processes would keep it open
    args, command = receive_message(link)
    handlers: SimpleQueue[_CommandHandler] = SimpleQueue()
    receiver = threading.Thread(target=_receive_commands, args=(link, handlers), daemon=True)
    receiver.start()
    try:
        llm = load_llm(args, command)
        info = _frame_info(EngineInfo.of(llm))
    except RoseinferError as error:
        link.sendall(frame_message(error))
        return 2
    link.sendall(info)
    freeze_gc()
    handlers.put(_CommandHandler(llm, link))
    receiver.join()
    return 1  # the thread failed, and printed a traceback


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
