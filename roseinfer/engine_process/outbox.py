"""What the engine's process tells the server: a thread merges it, and sends it all at once."""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from roseinfer.engine.engine import Update
from roseinfer.engine_process.any_process import Figures
from roseinfer.engine_process.part import Part
from roseinfer.engine_process.portable import portable
from roseinfer.engine_process.standard_streams import exit_now
from roseinfer.engine_process.wire import Pulse, Report, framed
from roseinfer.engine_thread import Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from roseinfer.engine.engine import Engine
    from roseinfer.engine_thread import News

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
