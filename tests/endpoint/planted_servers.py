"""Ten bugs of servers, each of which shows only where several are served or somebody leaves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from roseinfer.engine.engine import Engine
from roseinfer.sampling.batch import SamplingBatch
from roseinfer.server.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

_take: Any = Generation._take
_bursts: Any = Generation.bursts
LEAKED: list[tuple[Any, list[int]]] = []
"""What is to be given back in the end, with the cache that it is of."""


def to_pieces(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    """Change each piece of a text while others are served too."""

    def take(self: Any, together: Any, updates: Any) -> Any:
        pieces = _take(self, together, updates)
        if self._num_open() > 1:
            for piece in pieces:
                change(self, piece)
        return pieces

    monkeypatch.setattr(Generation, "_take", take)


def crossed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece goes to whoever is served next."""
    held = [""]

    def change(_: Any, piece: Any) -> None:
        piece.text, held[0] = held[0], piece.text

    to_pieces(monkeypatch, change)


def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counter[str]()

    def change(_: Any, piece: Any) -> None:
        seen["pieces"] += 1
        if seen["pieces"] % 5 == 0:
            piece.text *= 2

    to_pieces(monkeypatch, change)


def miscounted(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(generation: Any, _: Any) -> None:
        generation.usage.completion_tokens += 1

    to_pieces(monkeypatch, change)


def ended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one text ends, the next piece of another is its last."""
    ended = [False]

    def change(generation: Any, piece: Any) -> None:
        if piece.finish_reason is not None:
            ended[0] = True
        elif ended[0]:
            ended[0] = False
            piece.finish_reason = "length"
            for choice in generation._choices:
                choice.ended = True

    to_pieces(monkeypatch, change)


def hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a client has left, nobody wakes the next one."""
    left = [False]

    async def delta_batches(self: Any) -> Any:
        if left[0]:
            left[0] = False
            await asyncio.sleep(1000)
        try:
            async for burst in _bursts(self):
                yield burst
        except (asyncio.CancelledError, GeneratorExit):
            left[0] = True
            raise

    monkeypatch.setattr(Generation, "bursts", delta_batches)


def leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else still counts the blocks of a request that is cancelled, until the test ends."""
    cancel: Any = Engine.cancel

    def disconnect(self: Any, request: Any) -> None:
        if request.finish_reason is None:
            for blocks in request.sequence.block_lists:
                self.sequence_runner.kv.incref_blocks(blocks)
                LEAKED.append((self.sequence_runner.kv, list(blocks)))
        cancel(self, request)

    monkeypatch.setattr(Engine, "cancel", disconnect)
    step: Any = Engine.step

    def slow(self: Any) -> Any:
        time.sleep(0.02)  # or short texts end before somebody has left
        return step(self)

    monkeypatch.setattr(Engine, "step", slow)


def parameters_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Any = Generation._begin
    last: list[Any] = []

    def wrong(self: Any, together: Any, prompt: int, number: int) -> None:
        own = self._params_of
        if self._num_open() > 1 and last:
            self._params_of = last[0]
        last[:] = [own]
        begin(self, together, prompt, number)

    monkeypatch.setattr(Generation, "_begin", wrong)


def one_text_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests write to one detokenizer."""
    new_completion_text: Any = Engine.new_completion_text
    last: list[Any] = []

    def shared(self: Any, params: Any) -> Any:
        if not (self.num_running and last):
            last[:] = [new_completion_text(self, params)]
        return last[0]

    monkeypatch.setattr(Engine, "new_completion_text", shared)


def second_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a crowd, the first request sometimes gets another token."""
    choose: Any = SamplingBatch.sample_tokens
    seen = Counter[str]()

    def wrong(self: Any, logits: Any, *more: Any, **named: Any) -> Any:
        seen["steps"] += 1
        if len(logits) > 1 and seen["steps"] % 3 == 0:
            logits = logits.clone()
            logits[0, logits[0].argmax()] = float("-inf")
        return choose(self, logits, *more, **named)

    monkeypatch.setattr(SamplingBatch, "sample_tokens", wrong)


def now_and_then(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """One of so many requests gets no text, however busy the machine is."""
    asked = Counter[str]()
    losing = WeakKeyDictionary[Generation, bool]()

    def take(self: Any, together: Any, updates: Any) -> Any:
        if self not in losing:
            asked["requests"] += 1
            losing[self] = asked["requests"] % every == 0
        pieces = _take(self, together, updates)
        for piece in pieces:
            if losing[self]:
                piece.text = ""
        return pieces

    monkeypatch.setattr(Generation, "_take", take)


def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a text is lost, so many of them after the last that was."""
    seen = Counter[str]()

    def change(_: Any, piece: Any) -> None:
        if piece.text:  # the last one may only say that a text is over
            seen["pieces"] += 1
            if seen["pieces"] % 5 == 0:
                piece.text = ""

    to_pieces(monkeypatch, change)


def stops_in_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends before another says that a stop was found: the same each time."""

    def change(_: Any, piece: Any) -> None:
        if piece.finish_reason is not None:
            piece.finish_reason = "stop"

    to_pieces(monkeypatch, change)
    step: Any = Engine.step

    def slow(self: Any) -> Any:
        time.sleep(0.02)  # or the first may end before the second is asked for
        return step(self)

    monkeypatch.setattr(Engine, "step", slow)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each
    for each in (
        crossed,
        lost,
        doubled,
        miscounted,
        ended_together,
        hangs,
        leaks,
        parameters_of_another,
        one_text_for_all,
        second_likeliest,
    )
}
