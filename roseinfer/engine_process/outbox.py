"""What the engine's process tells the server: a thread merges it, and sends it all at once."""

from __future__ import annotations

import os
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
from roseinfer.engine_process.wire import Report, framed
from roseinfer.engine_thread import Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from roseinfer.engine.engine import Engine
    from roseinfer.engine_thread import News

_FEW = 4
"""Where no more texts are open, whatever comes is sent at once."""
_APART_S = 0.005
"""Messages are at least so far apart where there are more."""
_GLANCE_S = 0.05
"""So often figures are looked at while they may change without a text that gets something."""


@dataclass(slots=True, eq=False)
class NumberedListener(Listener):
    """A text that somebody in the other process waits for."""

    number: int = 0
    part: Part | None = None
    """What came for it and was not sent yet, which the outbox's thread alone sees."""
    begun: bool = False
    """True when something was told of its prompt."""


class Outbox:
    """The inbox of listeners in the other process, where it is gone only with this one.

    The engine's thread does no more for a token than to leave it in a queue with all of its step.
    """

    gone = False

    def __init__(self, link: socket.socket, engine: Engine, stopped: Callable[[], bool]) -> None:
        self.open: dict[int, Listener] = {}
        """The texts that have neither ended nor been left."""
        self._link = link
        self._engine = engine
        self._stopped = stopped
        self._news: SimpleQueue[Sequence[News]] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._due: list[NumberedListener] = []
        """Those that have a part."""
        self._said: tuple[Figures, bool] | None = None
        """The figures that were sent last, and whether the engine had stopped."""
        self._sent_at = 0.0
        self._at_rest = False
        """True if nothing can change before there is news."""
        threading.Thread(target=self._run, name="roseinfer outbox", daemon=True).start()

    def put(self, news: Sequence[News]) -> bool:
        self._news.put(news)
        return True

    def look(self) -> None:
        """Have it look at the figures: something was asked for that may change them."""
        self._news.put(())

    def answer(self, number: int, error: BaseException | None) -> None:
        self._answers.put((number, None if error is None else portable(error)))
        self.look()

    def _run(self) -> None:
        try:
            while True:
                self._wait()
                self._send()
        except OSError:
            os._exit(0)  # the server has ended
        except BaseException:  # whatever it is, no stream may wait for ever
            traceback.print_exc()
            os._exit(1)

    def _wait(self) -> None:
        """Wait for news, and where many texts are open for some more."""
        try:
            self._merge(self._news.get(timeout=None if self._at_rest else _GLANCE_S))
        except Empty:
            return
        if len(self.open) > _FEW:
            time.sleep(max(0.0, self._sent_at + _APART_S - time.monotonic()))
        for _ in range(self._news.qsize()):
            self._merge(self._news.get())

    def _merge(self, news: Sequence[News]) -> None:
        """Add updates to the parts of their texts. This is all that is done for each token here."""
        for listener, what in news:
            assert type(listener) is NumberedListener
            if (part := listener.part) is None:
                part = listener.part = Part()
                self._due.append(listener)
            if type(what) is Update:
                part.add(what)
                if not listener.begun and part.tokens:
                    listener.begun = True
                    part.begin(what.request)
            else:
                assert isinstance(what, BaseException)
                part.count += 1
                part.error = what

    def _send(self) -> None:
        due, self._due = self._due, []
        told: list[tuple[Any, ...]] = []
        for listener in due:
            part, listener.part = listener.part, None
            assert part is not None
            if part.last:
                self.open.pop(listener.number, None)
                part.error = None if part.error is None else portable(part.error)
            told.append((listener.number, *part.packed()))
        figures, stopped = Figures.of(self._engine), self._stopped()
        changed = (figures, stopped) != self._said
        self._at_rest = not (changed or self.open or figures.running or figures.waiting)
        answers = [self._answers.get() for _ in range(self._answers.qsize())]
        if told or answers or changed:
            self._sent_at = time.monotonic()
            report = Report(told, figures if changed else None, stopped, answers)
            self._link.sendall(framed(report))
            self._said = figures, stopped
