"""The process that an engine has for its own: it loads the model, and does what the server says.

It ends when the server's process does, however that ends, since the link between them closes then.
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
from roseinfer.engine.engine import Update
from roseinfer.engine_client.protocol import (
    GUIDES_AT_ONCE,
    Facts,
    Figures,
    Part,
    keep_loaded,
    portable,
    tokenizer_stays,
)
from roseinfer.engine_client.standard_streams import exit_now, queued_streams
from roseinfer.engine_client.subprocess_client import (
    Add,
    CheckGuide,
    Leave,
    Order,
    Pulse,
    Report,
    Taken,
    framed,
    receive,
)
from roseinfer.engine_thread import Listener
from roseinfer.errors import RoseinferError
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.engine.engine import Engine
    from roseinfer.engine_thread import News
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM

# What the engine's process tells the server: a thread merges it, and sends it all at once.


_FEW = 4
"""Where no more texts are open, whatever comes is sent at once."""
_APART_S, _MOST_APART_S = 0.005, 0.03
"""Messages are at least so far apart where there are more. The more there are the farther apart
they come, since each part takes time on both sides."""
_PARTS_A_SECOND = 10_000
_GLANCE_S = 0.05
"""So often figures are looked at while they may change without a text that gets something."""
_BEAT_S = 0.5
"""Seconds after which a message is sent at the latest: it shows that this process runs."""


@dataclass(slots=True, eq=False)
class NumberedListener(Listener):
    """A text that somebody in the other process waits for."""

    number: int = 0
    part: Part | None = None
    """What came for it and was not sent yet."""
    begun: bool = False
    """True when something was told of its prompt."""


class Outbox:
    """The inbox of listeners in the other process, where it is gone only with this one.

    The engine's thread adds what a step brings to the parts of its texts, and this one's own thread
    sends them. Handing over every token would cost more: each thread would have objects to give up
    that the other has made.
    """

    gone = False

    def __init__(self, link: socket.socket, engine: Engine, pulse: Callable[[], Pulse]) -> None:
        self.open: dict[int, Listener] = {}
        """The texts that have neither ended nor been left."""
        self._link = link
        self._engine = engine
        self._pulse = pulse
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._due: list[NumberedListener] = []
        """Those that have a part."""
        self._merging = threading.Lock()
        """Held where something is added to parts, and where these are taken."""
        self._said: tuple[Figures, str | None] | None = None
        """The figures that were sent last, and why the engine had stopped, if it had."""
        self._sent_at = 0.0
        self._at_rest = False
        """True if nothing can change before there is news."""
        threading.Thread(target=self._run, name="roseinfer outbox", daemon=True).start()

    def put(self, news: Sequence[News]) -> bool:
        """Add updates to the parts of their texts. This is all that is done for each token here."""
        with self._merging:
            due = self._due
            idle = not due
            for listener, what in news:
                assert type(listener) is NumberedListener
                if (part := listener.part) is None:
                    part = listener.part = Part()
                    due.append(listener)
                if type(what) is Update:
                    part.add(what)
                    if not listener.begun and part.tokens:
                        listener.begun = True
                        part.begin(what.request)
                else:
                    assert isinstance(what, BaseException)
                    part.count += 1
                    part.error = what
        if idle:
            self._wake.put(None)
        return True

    def look(self) -> None:
        """Have it look at the figures: something was asked for that may change them."""
        self._wake.put(None)

    def answer(self, number: int, error: BaseException | None) -> None:
        self._answers.put((number, None if error is None else portable(error)))
        self.look()

    def _run(self) -> None:
        try:
            while True:
                self._wait()
                self._send()
        except OSError:
            exit_now(0)  # the server has ended
        except BaseException:  # whatever it is, no stream may wait for ever
            traceback.print_exc()
            exit_now(1)

    def _wait(self) -> None:
        """Wait for something to send, and where many texts are open for some more."""
        try:
            self._wake.get(timeout=_BEAT_S if self._at_rest else _GLANCE_S)
        except Empty:
            return
        if (texts := len(self.open)) > _FEW:
            apart = min(max(_APART_S, texts / _PARTS_A_SECOND), _MOST_APART_S)
            time.sleep(max(0.0, self._sent_at + apart - time.monotonic()))

    def _send(self) -> None:
        for _ in range(self._wake.qsize()):
            self._wake.get()
        with self._merging:
            due, self._due = self._due, []
            parts = [listener.part for listener in due]
            for listener in due:
                listener.part = None
        told: list[tuple[Any, ...]] = []
        for listener, part in zip(due, parts, strict=True):
            assert part is not None
            if part.last:
                self.open.pop(listener.number, None)
                part.error = None if part.error is None else portable(part.error)
            told.append((listener.number, *part.packed()))
        figures, pulse = Figures.of(self._engine), self._pulse()
        changed = (figures, pulse.stopped) != self._said
        self._at_rest = not (changed or self.open or figures.running or figures.waiting)
        answers = [self._answers.get() for _ in range(self._answers.qsize())]
        now = time.monotonic()
        if told or answers or changed or now - self._sent_at >= _BEAT_S:
            self._sent_at = now
            report = Report(told, figures if changed else None, pulse, answers)
            self._link.sendall(framed(report))
            self._said = figures, pulse.stopped


class _Desk:
    """Carries out orders. The thread that hears them calls it."""

    def __init__(self, llm: LLM, link: socket.socket) -> None:
        # Here, since all of it needs torch, of which nothing is said before.
        # merged
        from roseinfer.engine_thread import EngineThread

        self._new_listener = NumberedListener
        self._engine = llm.engine
        self._thread = EngineThread(llm)
        self._outbox = Outbox(link, llm.engine, self._pulse)
        self._listeners: dict[int, NumberedListener] = {}
        self._guides = ThreadPoolExecutor(1, "roseinfer-guides")
        """Submits texts with guides, in order."""
        self._checks = ThreadPoolExecutor(GUIDES_AT_ONCE, "roseinfer-checks")
        self._leaving = threading.Lock()
        """Held where a text is left, and where it is looked whether one was."""

    def _pulse(self) -> Pulse:
        thread = self._thread
        return Pulse(thread.rounds, thread.busy, thread.stopped)

    def do(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Add(number, token_ids, params):
                    self._add(number, token_ids, params)
                case Taken(counts):
                    for number, count in counts.items():
                        if (listener := self._outbox.open.get(number)) is not None:
                            self._thread.note_taken(listener, count)
                case Leave(numbers):
                    self._leave(numbers)
                case CheckGuide(number, guide):
                    self._checks.submit(self._check, number, guide)
        self._outbox.look()

    def _add(self, number: int, token_ids: list[int], params: SamplingParams) -> None:
        listener = self._new_listener(self._outbox, number=number)
        self._outbox.open[number] = listener
        if params.guide is None:
            self._submit(listener, token_ids, params)
        else:  # to prepare one takes time, and others must not wait
            self._guides.submit(self._submit, listener, token_ids, params)

    def _submit(
        self, listener: NumberedListener, token_ids: list[int], params: SamplingParams
    ) -> None:
        try:
            text, guide = self._engine.text_for(params), self._engine.guide_for(params)
            with self._leaving:
                if listener.number in self._outbox.open:
                    self._thread.submit(listener, token_ids, params, text, guide)
        except BaseException as error:  # whatever it is, only this text fails
            self._outbox.put([(listener, error)])

    def _leave(self, numbers: list[int]) -> None:
        with self._leaving:
            for number in numbers:
                if (listener := self._outbox.open.pop(number, None)) is not None:
                    self._thread.leave(listener)

    def _check(self, number: int, guide: Guide) -> None:
        try:
            self._engine.guide_for(SamplingParams(guide=guide))
        except BaseException as error:  # whatever it is, who asked must not wait for ever
            self._outbox.answer(number, error)
        else:
            self._outbox.answer(number, None)


def _hear(link: socket.socket, desks: SimpleQueue[_Desk]) -> None:
    """Do what the server says until it ends, and end then, whatever else is going on."""
    try:
        orders = receive(link)  # there are none before the server was told that the model is there
        desk = desks.get()
        while True:
            desk.do(orders)
            orders = receive(link)
    except (EOFError, OSError):
        exit_now(0)


def _as_sent(facts: Facts) -> bytes:
    try:
        return framed(facts)
    except Exception as error:  # whatever it is that a tokenizer holds
        raise tokenizer_stays(error) from error


def main(number: int) -> int:
    """Serve the process at the other end of a socket, of which the number is known."""
    with queued_streams():
        return _serve(number)


def _serve(number: int) -> int:
    # A terminal's Ctrl-C, and the SIGTERM of a service manager, go to all processes: the server
    # lets texts end, and this one must go on meanwhile.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    link = socket.socket(fileno=number)
    os.set_inheritable(number, False)  # else processes of this one would keep it open
    args, command = receive(link)
    desks: SimpleQueue[_Desk] = SimpleQueue()
    hearing = threading.Thread(target=_hear, args=(link, desks), daemon=True)
    hearing.start()
    try:
        llm = load_llm(args, command)
        facts = _as_sent(Facts.of(llm))
    except RoseinferError as error:
        link.sendall(framed(error))
        return 2
    link.sendall(facts)
    keep_loaded()
    desks.put(_Desk(llm, link))
    hearing.join()
    return 1  # it broke down, and said where


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
