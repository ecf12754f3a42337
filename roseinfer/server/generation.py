"""Generation of all choices of one HTTP request, as a stream of deltas."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roseinfer.server.metrics import FinishedCompletion

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from roseinfer.engine_client.protocol import (
        EngineClient,
        OutputDelta,
        PrefillStats,
        RequestGroup,
        TopLogprobs,
    )
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.server.metrics import CompletionMetrics
    from roseinfer.server.prompts import Prompt


_MAX_CHUNKS_PER_S = 8000
"""Chunks per second, of all completions together, beyond which tokens are coalesced."""
_MAX_CHUNKS_PER_S_IN_PROCESS = 2000
"""The same limit if the engine shares the interpreter: sending takes time from it."""
_MAX_TOKENS_PER_CHUNK = 16
"""Tokens to coalesce, about: the engine pauses a completion with many more unread tokens."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.002, 0.1


EchoedTokens = list[tuple[int, float | None]]
"""Tokens of a prompt with their logprobs; that of the first is None."""


@dataclass(slots=True)
class ChoiceDelta:
    """New output of one choice: a part of its completion, or all of it."""

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Logprobs of the tokens; empty if not requested."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Top tokens at each position with their logprobs; empty if not requested."""
    echoed_tokens: EchoedTokens = field(default_factory=list)
    """Tokens of the prompt, in the first delta only; empty if their logprobs are not requested."""
    finish_reason: str | None = None

    def add(self, later: ChoiceDelta) -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.top_logprobs += later.top_logprobs
        self.echoed_tokens = self.echoed_tokens or later.echoed_tokens
        self.finish_reason = later.finish_reason


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""


@dataclass(slots=True)
class _Choice:
    """State of one choice."""

    number: int
    prompt: int
    max_new_tokens: int
    tokens: int = 0
    prefill_stats: PrefillStats | None = None
    first: float = 0.0
    """Time of its first token, by ``time.perf_counter``."""
    newest: float = 0.0
    """Time of its newest token, by ``time.perf_counter``."""
    decode_s: float | None = None
    """Seconds from its first token to its last, by the engine; None until it has finished."""
    has_ended: bool = False


class Generation:
    """All choices of one HTTP request: number ``prompt * n + i`` is the ``i``-th for a prompt.

    The first choice for each prompt begins alone. When it has a token, the prompt is in the prefix
    cache, and the other choices begin with the cached prefix.
    """

    def __init__(
        self,
        engine_client: EngineClient,
        metrics: CompletionMetrics,
        prompts: Sequence[Prompt],
        choices: int,
        params_of: Callable[[Prompt, int], SamplingParams],
        num_open: Callable[[], int],
        *,
        received_at: float,
        prefill_only: bool = False,
    ) -> None:
        """Prepare ``choices`` choices per prompt; ``params_of`` takes a prompt and a choice number.

        ``num_open`` returns the number of open completions of the whole server. ``received_at`` is
        the time of the request, by ``time.perf_counter``. With ``prefill_only``, the one token that
        must be generated after each prompt is left out of the output.
        """
        self.prompts = prompts
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self._engine_client = engine_client
        self._metrics = metrics
        self._num_choices = choices
        self._params_of = params_of
        self._num_open = num_open
        self._prefill_only = prefill_only
        self._choices: list[_Choice] = []
        """Choices, in the order of their start."""
        self._echoed: dict[int, EchoedTokens] = {}
        """Echoed tokens by prompt number, from the prefill of its first choice."""
        self._seconds_per_token = 0.0
        """Seconds per token of the newest delta."""
        self._received_at = received_at

    @property
    def finished(self) -> bool:
        """True when all choices have ended."""
        return all(choice.has_ended for choice in self._choices)

    async def collect_choices(self) -> list[ChoiceDelta]:
        """Wait for all choices to end, and return each as one delta."""
        choices = [ChoiceDelta(number) for number in range(len(self.prompts) * self._num_choices)]
        async with aclosing(self.bursts()) as bursts:
            async for burst in bursts:
                for delta in burst:
                    choices[delta.choice].add(delta)
        return choices

    async def bursts(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Yield the new output, as one delta for each choice that has some.

        Leaving the loop must close this generator, which cancels the choices that have not ended.
        """
        group = self._engine_client.open_group()
        finish_reason = "abort"
        try:
            for prompt in range(len(self.prompts)):
                self._begin(group, prompt, 0)
            while not self.finished:
                yield self._take(group, await group.next())
                if not self.finished:
                    await asyncio.sleep(self._coalescing_delay_s())
        except Exception:
            finish_reason = "error"
            raise
        finally:
            group.cancel()
            for choice in self._choices:
                if not choice.has_ended:
                    self._end(choice, finish_reason, time.perf_counter())
            self._record_prompts()

    def _coalescing_delay_s(self) -> float:
        """Return how many seconds to coalesce tokens, since each chunk takes time to send.

        With few open completions, each token is sent at once.
        """
        max_chunks_per_s = (
            _MAX_CHUNKS_PER_S
            if self._engine_client.separate_process
            else _MAX_CHUNKS_PER_S_IN_PROCESS
        )
        seconds = self._num_open() / max_chunks_per_s
        if seconds < _MIN_PAUSE_S:
            return 0
        return min(seconds, self._seconds_per_token * _MAX_TOKENS_PER_CHUNK, _MAX_PAUSE_S)

    def _begin(self, group: RequestGroup, prompt: int, number: int) -> None:
        spec = self.prompts[prompt]
        params = self._params_of(spec, number)
        group.add(spec.token_ids, params)
        self._choices.append(
            _Choice(prompt * self._num_choices + number, prompt, params.max_new_tokens)
        )

    def _take(
        self, group: RequestGroup, outputs: list[tuple[int, OutputDelta]]
    ) -> list[ChoiceDelta]:
        """Convert the engine's output to deltas, and begin the choices that can begin now."""
        now = time.perf_counter()
        deltas = []
        for at, output in outputs:
            if output.error is not None:
                raise output.error
            choice = self._choices[at]
            delta = self._to_delta(choice.number, output)
            if output.prefill_stats is not None:
                self._record_prefill(group, choice, output.prefill_stats, now)
                delta.echoed_tokens = self._echoed.get(choice.prompt, [])
            if output.is_final:
                choice.decode_s = output.decode_s
            self._record_delta(choice, delta, now)
            deltas.append(delta)
        return deltas

    def _to_delta(self, number: int, output: OutputDelta) -> ChoiceDelta:
        if self._prefill_only:
            return ChoiceDelta(number, finish_reason=output.finish_reason and "length")
        return ChoiceDelta(
            number,
            output.text,
            output.tokens,
            output.logprobs,
            output.top_logprobs,
            finish_reason=output.finish_reason,
        )

    def _record_prefill(
        self, group: RequestGroup, choice: _Choice, stats: PrefillStats, now: float
    ) -> None:
        """Record the prefill of a prompt, and begin its other choices."""
        tokens = self.prompts[choice.prompt].token_ids
        self._metrics.record_prefill(len(tokens), stats.cached_tokens, now - self._received_at)
        choice.prefill_stats = stats
        choice.first = choice.newest = now
        if choice.number % self._num_choices == 0:
            self.usage.cached_tokens += stats.cached_tokens
            if stats.logprobs:
                self._echoed[choice.prompt] = [*zip(tokens, stats.logprobs, strict=True)]
            for number in range(1, self._num_choices):
                self._begin(group, choice.prompt, number)

    def _record_delta(self, choice: _Choice, delta: ChoiceDelta, now: float) -> None:
        first = not choice.tokens
        choice.tokens += len(delta.tokens)
        self.usage.completion_tokens += len(delta.tokens)
        self._metrics.record_tokens(len(delta.tokens), now - choice.newest, first=first)
        self._seconds_per_token = (now - choice.newest) / max(1, len(delta.tokens))
        choice.newest = now
        if delta.finish_reason is not None:
            self._end(choice, delta.finish_reason, now)

    def _end(self, choice: _Choice, finish_reason: str, now: float) -> None:
        choice.has_ended = True
        self._metrics.record_finish(finish_reason, self._finished_stats(choice, now))

    def _finished_stats(self, choice: _Choice, now: float) -> FinishedCompletion | None:
        if choice.prefill_stats is None:
            return None
        decode_s = choice.decode_s
        return FinishedCompletion(
            len(self.prompts[choice.prompt].token_ids),
            choice.tokens,
            choice.max_new_tokens,
            choice.prefill_stats,
            choice.newest - choice.first if decode_s is None else decode_s,
            now - self._received_at,
        )

    def _record_prompts(self) -> None:
        """Record the prompts that were prefilled, when all choices have ended."""
        max_length: dict[int, int] = {}
        for choice in self._choices:
            if choice.prefill_stats is not None:
                max_length[choice.prompt] = max(max_length.get(choice.prompt, 0), choice.tokens)
        for tokens in max_length.values():
            self._metrics.record_prompt(self._num_choices, tokens)
