"""What the engine's thread adds to parts is sent once and in order, whatever their sender does."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.engine.engine import Update
from roseinfer.engine_client import child as module
from roseinfer.engine_client.child import RemoteListener, ReportSender
from roseinfer.engine_client.protocol import OutputDelta
from roseinfer.engine_client.subprocess_client import Heartbeat, receive_message

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 20.0
PULSE = Heartbeat(3, True, None)


class Desk:
    """An outbox without a server behind it."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.engine = LLM("tiny", kv_cache_tokens=256, max_length=64).engine
        self.outbox = ReportSender(theirs, self.engine, lambda: PULSE)
        self._ours = ours

    def listener(self, number: int) -> RemoteListener:
        listener = RemoteListener(self.outbox, number=number)
        listener.request = self.engine.submit("a", SamplingParams())
        listener.request.started_at = listener.request.first_token_at = 0.0
        self.outbox.open[number] = listener
        return listener

    def put(self, listener: RemoteListener, *tokens: int) -> None:
        assert listener.request is not None
        updates = [Update(listener.request, token, chr(token)) for token in tokens]
        self.outbox.put([(listener, update) for update in updates])

    def sent(self, count: int) -> dict[int, list[int]]:
        """Wait for so many tokens of all texts together."""
        found: dict[int, list[int]] = {}
        while sum(map(len, found.values())) < count:
            for number, *to_tuple in receive_message(self._ours).parts:
                part = OutputDelta(*to_tuple)
                assert part.text == "".join(map(chr, part.tokens))
                found.setdefault(number, []).extend(part.tokens)
        return found


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(module, "_STATS_POLL_S", 1000.0)  # so that nothing is sent by chance
    before = threading.enumerate()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(WAIT_S)
        desk = Desk(ours, theirs)
        yield desk
        # Its thread ends the process, when it finds that nobody listens.
        monkeypatch.setattr("os._exit", lambda _: None)
    desk.outbox.answer(0, None)
    for thread in set(threading.enumerate()).difference(before):
        thread.join(WAIT_S)


def test_every_token_comes_once_and_in_order(desk: Desk) -> None:
    """More texts than are told of at once, from a thread that does not wait for the other one."""
    listeners = [desk.listener(number) for number in range(12)]
    steps = [[65 + (step * number) % 26 for number in range(12)] for step in range(2000)]

    def tell() -> None:
        for step in steps:
            for listener, token in zip(listeners, step, strict=True):
                desk.put(listener, token)

    threading.Thread(target=tell).start()
    found = desk.sent(12 * 2000)
    assert found == {number: [step[number] for step in steps] for number in range(12)}


def test_it_shows_that_it_runs_while_nothing_happens(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STATS_POLL_S", 0.01)
    desk.outbox.wake()
    first, *later = [receive_message(desk._ours) for _ in range(3)]
    assert first.stats is not None
    assert [(each.parts, each.stats, each.pulse) for each in later] == [([], None, PULSE)] * 2


def test_a_part_is_not_sent_while_something_is_added_to_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was packed before would be forgotten with what came after that."""
    sending = threading.Event()

    class Slow(OutputDelta):
        def add(self, update: Update) -> None:
            if self.tokens:
                sending.wait(0.3)  # by then it would have been packed
            super().add(update)

        def to_tuple(self) -> tuple[Any, ...]:
            sending.set()
            return super().to_tuple()

    monkeypatch.setattr(module, "OutputDelta", Slow)
    desk.put(desk.listener(7), *b"abc")
    assert desk.sent(3) == {7: [*b"abc"]}
