"""Report sender: deltas of the engine's thread are sent once and in order."""

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
HEARTBEAT = Heartbeat(3, True, None)


class SenderHarness:
    """Report sender without a server."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.engine = LLM("tiny", kv_cache_tokens=256, max_length=64).engine
        self.outbox = ReportSender(theirs, self.engine, lambda: HEARTBEAT)
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

    def receive_tokens(self, count: int) -> dict[int, list[int]]:
        """Wait for this many tokens of all requests together, and return them by request."""
        tokens_by_number: dict[int, list[int]] = {}
        while sum(map(len, tokens_by_number.values())) < count:
            for number, *to_tuple in receive_message(self._ours).parts:
                part = OutputDelta(*to_tuple)
                assert part.text == "".join(map(chr, part.tokens))
                tokens_by_number.setdefault(number, []).extend(part.tokens)
        return tokens_by_number


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[SenderHarness]:
    monkeypatch.setattr(module, "_STATS_POLL_S", 1000.0)  # no report without an update
    before = threading.enumerate()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(WAIT_S)
        harness = SenderHarness(ours, theirs)
        yield harness
        # Its thread ends the process when it finds the connection closed.
        monkeypatch.setattr("os._exit", lambda _: None)
    harness.outbox.answer(0, None)
    for thread in set(threading.enumerate()).difference(before):
        thread.join(WAIT_S)


def test_tokens_are_sent_once_and_in_order(harness: SenderHarness) -> None:
    """There are more requests than one report has, updated by a thread that never waits."""
    listeners = [harness.listener(number) for number in range(12)]
    steps = [[65 + (step * number) % 26 for number in range(12)] for step in range(2000)]

    def send_updates() -> None:
        for step in steps:
            for listener, token in zip(listeners, step, strict=True):
                harness.put(listener, token)

    threading.Thread(target=send_updates).start()
    tokens_by_number = harness.receive_tokens(12 * 2000)
    assert tokens_by_number == {number: [step[number] for step in steps] for number in range(12)}


def test_heartbeats_are_sent_while_idle(
    harness: SenderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STATS_POLL_S", 0.01)
    harness.outbox.wake()
    first, *later = [receive_message(harness._ours) for _ in range(3)]
    assert first.stats is not None
    assert [(each.parts, each.stats, each.heartbeat) for each in later] == [
        ([], None, HEARTBEAT)
    ] * 2


def test_delta_is_not_sent_while_an_update_is_added(
    harness: SenderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier packed delta would be lost with all that was added later."""
    sending = threading.Event()

    class Slow(OutputDelta):
        def add(self, update: Update) -> None:
            if self.tokens:
                sending.wait(0.3)  # enough time to be packed
            super().add(update)

        def to_tuple(self) -> tuple[Any, ...]:
            sending.set()
            return super().to_tuple()

    monkeypatch.setattr(module, "OutputDelta", Slow)
    harness.put(harness.listener(7), *b"abc")
    assert harness.receive_tokens(3) == {7: [*b"abc"]}
