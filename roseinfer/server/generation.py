"""The one way from prompts to texts: choices that are generated together, piece by piece."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roseinfer.server.metrics import Ended

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from roseinfer.engine_client.protocol import Likeliest, Part, ServedEngine, Start, Texts
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.server.metrics import TextCounts
    from roseinfer.server.prompts import Prompt


_CHUNKS_A_SECOND = 8000
"""Where more would be sent of all texts together, tokens wait for each other."""
_CHUNKS_BESIDE_ENGINE = 2000
"""The same where the engine shares the interpreter: so much of its time may sending take."""
_MOST_TO_A_CHUNK = 16
"""They wait for about so many. A text with many more unread would be paused."""
_LEAST_S, _MOST_S = 0.002, 0.1


Echoed = list[tuple[int, float | None]]
"""The tokens of a prompt with their log-probabilities, of which the first has none."""


@dataclass(slots=True)
class Piece:
    """What came for one choice: a part of its text, or all of it."""

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One for each token, if they were asked for."""
    likeliest: list[Likeliest] = field(default_factory=list)
    """The same for the likeliest tokens at its place."""
    echoed: Echoed = field(default_factory=list)
    """Where text begins: the tokens of its prompt, if theirs were asked for."""
    finish_reason: str | None = None

    def add(self, later: Piece) -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.likeliest += later.likeliest
        self.echoed = self.echoed or later.echoed
        self.finish_reason = later.finish_reason


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of prompts that the prefix cache had."""


@dataclass(slots=True)
class _Choice:
    """A choice that is generated."""

    number: int
    prompt: int
    most_tokens: int
    tokens: int = 0
    start: Start | None = None
    first: float = 0.0
    """When its first token came."""
    newest: float = 0.0
    """When its newest token came."""
    decode_s: float | None = None
    """From its first token to its last, where the engine has said so."""
    ended: bool = False


class Generation:
    """All choices of one HTTP request: number ``prompt * n + i`` is the ``i``-th for a prompt.

    The first for each prompt begins alone. When it has a token, the prefix cache has what is stored
    of the prompt, and the others begin with that.
    """

    def __init__(
        self,
        served: ServedEngine,
        metrics: TextCounts,
        prompts: Sequence[Prompt],
        choices: int,
        params_of: Callable[[Prompt, int], SamplingParams],
        num_open: Callable[[], int],
        *,
        began: float,
        prompts_only: bool = False,
    ) -> None:
        """``choices`` are wanted for each prompt; ``params_of`` takes it and the number of one.

        ``num_open`` says how many texts are served now, here and elsewhere. The request ``began``
        when it was so late by ``time.perf_counter``. With ``prompts_only`` the token that must
        follow each prompt is told to nobody.
        """
        self.prompts = prompts
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self._served = served
        self._metrics = metrics
        self._wanted = choices
        self._params_of = params_of
        self._num_open = num_open
        self._prompts_only = prompts_only
        self._choices: list[_Choice] = []
        """In the order in which they began."""
        self._echoed: dict[int, Echoed] = {}
        """By the numbers of prompts: what the first choice for each was told of it."""
        self._token_s = 0.0
        """How long the newest tokens took, each."""
        self._began = began

    @property
    def over(self) -> bool:
        """True when nothing more comes."""
        return all(choice.ended for choice in self._choices)

    async def whole(self) -> list[Piece]:
        """Return all of each choice."""
        wholes = [Piece(number) for number in range(len(self.prompts) * self._wanted)]
        async with aclosing(self.bursts()) as bursts:
            async for burst in bursts:
                for piece in burst:
                    wholes[piece.choice].add(piece)
        return wholes

    async def bursts(self) -> AsyncGenerator[list[Piece], None]:
        """Yield what has come since the last time, a piece for each choice that got something.

        A text that nobody reads any more is cancelled: who leaves the loop closes it.
        """
        texts = self._served.texts()
        why = "abort"
        try:
            for prompt in range(len(self.prompts)):
                self._begin(texts, prompt, 0)
            while not self.over:
                yield self._take(texts, await texts.next())
                if not self.over:
                    await asyncio.sleep(self._pause())
        except Exception:
            why = "error"
            raise
        finally:
            texts.leave()
            for choice in self._choices:
                if not choice.ended:
                    self._end(choice, why, time.perf_counter())
            self._note_prompts()

    def _pause(self) -> float:
        """Return how long to let tokens come together, since each chunk takes time to send.

        Where few are served, each token is sent when it comes.
        """
        most = _CHUNKS_A_SECOND if self._served.apart else _CHUNKS_BESIDE_ENGINE
        seconds = self._num_open() / most
        if seconds < _LEAST_S:
            return 0
        return min(seconds, self._token_s * _MOST_TO_A_CHUNK, _MOST_S)

    def _begin(self, texts: Texts, prompt: int, number: int) -> None:
        asked = self.prompts[prompt]
        params = self._params_of(asked, number)
        texts.add(asked.token_ids, params)
        self._choices.append(_Choice(prompt * self._wanted + number, prompt, params.max_new_tokens))

    def _take(self, texts: Texts, parts: list[tuple[int, Part]]) -> list[Piece]:
        """Return the pieces that parts are, and begin what can begin now."""
        now = time.perf_counter()
        pieces = []
        for at, part in parts:
            if part.error is not None:
                raise part.error
            choice = self._choices[at]
            piece = self._piece(choice.number, part)
            if part.start is not None:
                self._note_first(texts, choice, part.start, now)
                piece.echoed = self._echoed.get(choice.prompt, [])
            if part.last:
                choice.decode_s = part.decode_s
            self._note(choice, piece, now)
            pieces.append(piece)
        return pieces

    def _piece(self, number: int, part: Part) -> Piece:
        if self._prompts_only:
            return Piece(number, finish_reason=part.finish_reason and "length")
        return Piece(
            number,
            part.text,
            part.tokens,
            part.logprobs,
            part.likeliest,
            finish_reason=part.finish_reason,
        )

    def _note_first(self, texts: Texts, choice: _Choice, start: Start, now: float) -> None:
        """Count a prompt that was read, and begin the other choices for it."""
        tokens = self.prompts[choice.prompt].token_ids
        self._metrics.began(len(tokens), start.found, now - self._began)
        choice.start = start
        choice.first = choice.newest = now
        if choice.number % self._wanted == 0:
            self.usage.cached_tokens += start.found
            if start.logprobs:
                self._echoed[choice.prompt] = [*zip(tokens, start.logprobs, strict=True)]
            for number in range(1, self._wanted):
                self._begin(texts, choice.prompt, number)

    def _note(self, choice: _Choice, piece: Piece, now: float) -> None:
        first = not choice.tokens
        choice.tokens += len(piece.tokens)
        self.usage.completion_tokens += len(piece.tokens)
        self._metrics.generated(len(piece.tokens), now - choice.newest, first=first)
        self._token_s = (now - choice.newest) / max(1, len(piece.tokens))
        choice.newest = now
        if piece.finish_reason is not None:
            self._end(choice, piece.finish_reason, now)

    def _end(self, choice: _Choice, why: str, now: float) -> None:
        choice.ended = True
        self._metrics.ended(why, self._ended(choice, now))

    def _ended(self, choice: _Choice, now: float) -> Ended | None:
        if choice.start is None:
            return None
        decode_s = choice.decode_s
        return Ended(
            len(self.prompts[choice.prompt].token_ids),
            choice.tokens,
            choice.most_tokens,
            choice.start,
            choice.newest - choice.first if decode_s is None else decode_s,
            now - self._began,
        )

    def _note_prompts(self) -> None:
        """Count the prompts that were read, when all has ended."""
        longest: dict[int, int] = {}
        for choice in self._choices:
            if choice.start is not None:
                longest[choice.prompt] = max(longest.get(choice.prompt, 0), choice.tokens)
        for tokens in longest.values():
            self._metrics.answered(self._wanted, tokens)
