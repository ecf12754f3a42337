"""Planted bugs of servers, which only show with several requests or a disconnect."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from roseinfer.async_llm import StreamGroup
from roseinfer.engine.engine import Engine
from roseinfer.sampling import SamplingBatch
from roseinfer.server.generation import Generation
from roseinfer.server.schemas.choices import TokenTexts
from roseinfer.server.schemas.completions import CompletionBody

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

_take: Any = Generation._take
_bursts: Any = Generation.bursts
LEAKED: list[tuple[Any, list[int]]] = []
"""Leaked blocks to free at the end of a test, each with its cache."""


def change_pieces(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    """Change each piece of a text while other requests are served too."""

    def take(self: Any, batch: Any, updates: Any) -> Any:
        pieces = _take(self, batch, updates)
        if self._num_open() > 1:
            for piece in pieces:
                change(self, piece)
        return pieces

    monkeypatch.setattr(Generation, "_take", take)


def swap_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swap pieces between requests: a piece goes to the next one."""
    pending = [""]

    def change(_: Any, piece: Any) -> None:
        piece.text, pending[0] = pending[0], piece.text

    change_pieces(monkeypatch, change)


def repeat_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter[str]()

    def change(_: Any, piece: Any) -> None:
        counter["pieces"] += 1
        if counter["pieces"] % 5 == 0:
            piece.text *= 2

    change_pieces(monkeypatch, change)


def miscount_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(generation: Any, _: Any) -> None:
        generation.usage.completion_tokens += 1

    change_pieces(monkeypatch, change)


def end_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a second text: where one text ends, the next piece of another becomes its last."""
    other_ended = [False]

    def change(generation: Any, piece: Any) -> None:
        if piece.finish_reason is not None:
            other_ended[0] = True
        elif other_ended[0]:
            other_ended[0] = False
            piece.finish_reason = "length"
            for choice in generation._choices:
                choice.has_ended = True

    change_pieces(monkeypatch, change)


def hang_after_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hang the next stream after a client disconnects."""
    disconnected = [False]

    async def delta_batches(self: Any) -> Any:
        if disconnected[0]:
            disconnected[0] = False
            await asyncio.sleep(1000)
        try:
            async for burst in _bursts(self):
                yield burst
        except (asyncio.CancelledError, GeneratorExit):
            disconnected[0] = True
            raise

    monkeypatch.setattr(Generation, "bursts", delta_batches)


def leak_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a reference to the blocks of a cancelled request, until the test ends."""
    cancel: Any = Engine.cancel

    def disconnect(self: Any, request: Any) -> None:
        if request.finish_reason is None:
            for blocks in request.sequence.block_lists:
                self.sequence_runner.kv.incref_blocks(blocks)
                LEAKED.append((self.sequence_runner.kv, list(blocks)))
        cancel(self, request)

    monkeypatch.setattr(Engine, "cancel", disconnect)


def _serve_on(monkeypatch: pytest.MonkeyPatch, ignored: Callable[[StreamGroup], bool]) -> None:
    """Serve requests to their end, and read their tokens, where a disconnect is ignored."""
    tasks: set[asyncio.Task[None]] = set()
    cancel: Any = StreamGroup.cancel

    async def read_on(group: StreamGroup) -> None:
        for listener in group._numbers:
            while listener.request is None or listener.request.finish_reason is None:
                await group.next()

    def with_bug(self: StreamGroup) -> None:
        if not ignored(self):
            cancel(self)
            return
        task = asyncio.ensure_future(read_on(self))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    monkeypatch.setattr(StreamGroup, "cancel", with_bug)


def ignore_a_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on with requests after their client has disconnected."""
    _serve_on(monkeypatch, lambda _: True)


def ignore_an_early_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on with requests whose client has disconnected before their first token."""

    def has_no_token(group: StreamGroup) -> bool:
        requests = [listener.request for listener in group._numbers]
        return not all(request and request.num_generated for request in requests)

    _serve_on(monkeypatch, has_no_token)


def mix_up_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each piece of a response with several prompts to the next choice."""

    def take(self: Any, batch: Any, updates: Any) -> Any:
        pieces = _take(self, batch, updates)
        for piece in pieces:
            piece.choice = (piece.choice + 1) % len(self._choices)
        return pieces

    monkeypatch.setattr(Generation, "_take", take)


def echo_another_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Echo the first prompt for every choice once three prompts are echoed."""
    echoed_prompts: Any = CompletionBody.echoed_prompts

    async def with_bug(self: Any, prompts: Any) -> list[str]:
        echoed: list[str] = await echoed_prompts(self, prompts)
        return echoed[:1] * len(echoed) if len(echoed) > 2 else echoed

    monkeypatch.setattr(CompletionBody, "echoed_prompts", with_bug)


def lose_a_top_logprob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the top logprobs of every fifth piece's last token."""
    completion_logprobs: Any = TokenTexts.completion_logprobs
    counter = Counter[str]()

    def with_bug(*arguments: Any) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = completion_logprobs(*arguments)
        counter["pieces"] += 1
        if counter["pieces"] % 5 == 0:
            del lists["top_logprobs"][-1:]
        return lists

    monkeypatch.setattr(TokenTexts, "completion_logprobs", with_bug)


def lose_a_token_with_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the logprobs of a piece's last token, in all lists."""

    def change(_: Any, piece: Any) -> None:
        for name in ("tokens", "logprobs", "top_logprobs"):
            setattr(piece, name, getattr(piece, name)[:-1])

    change_pieces(monkeypatch, change)


def delay_top_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each token the top logprobs of the token before it."""
    latest: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()

    def change(generation: Any, piece: Any) -> None:
        if tops := list(piece.top_logprobs):
            before = latest.setdefault(generation, {})
            piece.top_logprobs = [before.get(piece.choice, tops[0]), *tops[:-1]]
            before[piece.choice] = tops[-1]

    change_pieces(monkeypatch, change)


def give_top_logprobs_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each piece the top logprobs of the previous piece of the same length."""
    last: dict[int, Any] = {}

    def change(_: Any, piece: Any) -> None:
        count = len(piece.tokens)
        last[count], piece.top_logprobs = piece.top_logprobs, last.get(count, piece.top_logprobs)

    change_pieces(monkeypatch, change)


def count_a_prompt_for_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the prompt of a request again for each further choice."""
    begin: Any = Generation._begin

    def with_bug(self: Any, group: Any, prompt: int, number: int) -> None:
        if number:
            self.usage.prompt_tokens += len(self.prompts[prompt].token_ids)
        begin(self, group, prompt, number)

    monkeypatch.setattr(Generation, "_begin", with_bug)


def count_the_first_choice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the tokens of the first choice of each prompt alone."""
    record: Any = Generation._record_delta

    def with_bug(self: Any, choice: Any, delta: Any, now: float) -> None:
        before = self.usage.completion_tokens
        record(self, choice, delta, now)
        if choice.number % self._num_choices:
            self.usage.completion_tokens = before

    monkeypatch.setattr(Generation, "_record_delta", with_bug)


def use_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Any = Generation._begin
    last: list[Any] = []

    def with_bug(self: Any, batch: Any, prompt: int, number: int) -> None:
        own_params = self._params_of
        if self._num_open() > 1 and last:
            self._params_of = last[0]
        last[:] = [own_params]
        begin(self, batch, prompt, number)

    monkeypatch.setattr(Generation, "_begin", with_bug)


def share_a_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two requests write to one detokenizer."""
    new_completion_text: Any = Engine.new_completion_text
    last: list[Any] = []

    def shared_text(self: Any, params: Any) -> Any:
        if not (self.num_running and last):
            last[:] = [new_completion_text(self, params)]
        return last[0]

    monkeypatch.setattr(Engine, "new_completion_text", shared_text)


def choose_the_second_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the first request of a batch another token in some steps."""
    choose: Any = SamplingBatch.sample_tokens
    counter = Counter[str]()

    def with_bug(self: Any, logits: Any, *arguments: Any, **options: Any) -> Any:
        counter["steps"] += 1
        if len(logits) > 1 and counter["steps"] % 3 == 0:
            logits = logits.clone()
            logits[0, logits[0].argmax()] = float("-inf")
        return choose(self, logits, *arguments, **options)

    monkeypatch.setattr(SamplingBatch, "sample_tokens", with_bug)


def lose_some_texts(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Lose the text of one of ``every`` requests, however busy the machine is."""
    counter = Counter[str]()
    loses_text = WeakKeyDictionary[Generation, bool]()

    def take(self: Any, batch: Any, updates: Any) -> Any:
        if self not in loses_text:
            counter["requests"] += 1
            loses_text[self] = counter["requests"] % every == 0
        pieces = _take(self, batch, updates)
        for piece in pieces:
            if loses_text[self]:
                piece.text = ""
        return pieces

    monkeypatch.setattr(Generation, "_take", take)


def lose_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose every fifth piece of text."""
    counter = Counter[str]()

    def change(_: Any, piece: Any) -> None:
        if piece.text:  # the last piece may have only a finish reason
            counter["pieces"] += 1
            if counter["pieces"] % 5 == 0:
                piece.text = ""

    change_pieces(monkeypatch, change)


def report_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report the finish reason "stop" for every request that ends before another."""

    def change(_: Any, piece: Any) -> None:
        if piece.finish_reason is not None:
            piece.finish_reason = "stop"

    change_pieces(monkeypatch, change)
    step: Any = Engine.step

    def slow_step(self: Any) -> Any:
        time.sleep(0.02)  # otherwise the first may end before the second arrives
        return step(self)

    monkeypatch.setattr(Engine, "step", slow_step)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each
    for each in (
        swap_pieces,
        lose_pieces,
        repeat_pieces,
        miscount_usage,
        end_another_text,
        hang_after_disconnect,
        leak_blocks,
        use_other_parameters,
        share_a_detokenizer,
        choose_the_second_token,
        ignore_a_disconnect,
        ignore_an_early_disconnect,
        mix_up_choices,
        echo_another_prompt,
        lose_a_top_logprob,
        lose_a_token_with_logprobs,
        delay_top_logprobs,
        give_top_logprobs_of_another_row,
        count_a_prompt_for_each_choice,
        count_the_first_choice_alone,
    )
}
