"""The process that an engine has for its own: it loads the model, and does what the server says.

It ends when the server's process does, however that ends, since the link between them closes then.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING

from roseinfer.cli.model_options import load_llm
from roseinfer.engine_process.any_process import GUIDES_AT_ONCE, Facts
from roseinfer.engine_process.loaded import keep_loaded
from roseinfer.engine_process.portable import tokenizer_stays
from roseinfer.engine_process.standard_streams import exit_now, queued_streams
from roseinfer.engine_process.wire import (
    Add,
    CheckGuide,
    Leave,
    Order,
    Pulse,
    Taken,
    framed,
    receive,
)
from roseinfer.errors import RoseinferError
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine_process.outbox import NumberedListener
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM


class _Desk:
    """Carries out orders. The thread that hears them calls it."""

    def __init__(self, llm: LLM, link: socket.socket) -> None:
        # Here, since all of it needs torch, of which nothing is said before.
        from roseinfer.engine_process.outbox import NumberedListener, Outbox
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
