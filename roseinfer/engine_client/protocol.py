"""What a server needs of an engine, wherever that runs."""

from __future__ import annotations

import gc
import pickle
import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from roseinfer.errors import ConfigError, RoseinferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine.engine import Engine, Update
    from roseinfer.engine.request import Request, RequestRoom
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM
    from roseinfer.models.shape import ModelShape
    from roseinfer.sampling_params import SamplingParams

# A part of a text: all that steps brought for it since somebody looked last.


Likeliest = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


class Start(NamedTuple):
    """What is known of a prompt when its first token is there."""

    found: int
    """How many of its tokens the prefix cache had."""
    queued_s: float
    """How long the engine let it wait before a step had some of it."""
    prefill_s: float
    """How long it took from there to the first token."""
    logprobs: list[float | None]
    """Those of its tokens, if they were asked for."""

    @classmethod
    def of(cls, request: Request) -> Start:
        begun, first = request.begun_at, request.first_at
        assert begun is not None
        assert first is not None
        return cls(
            min(request.found, request.prompt_length),
            begun - request.queued_at,
            first - begun,
            list(request.prompt_logprobs) if request.params.prompt_logprobs else [],
        )


@dataclass(slots=True)
class Part:
    """What several updates of one request come to. Errors are raised by who reads them."""

    count: int = 0
    """How many updates."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    start: Start | None = None
    """It comes with the first token."""
    decode_s: float = 0.0
    """With the last: how long it took from the first."""
    logprobs: list[float] = field(default_factory=list)
    """One for each token, if they were asked for."""
    likeliest: list[Likeliest] = field(default_factory=list)
    """The same for the likeliest tokens at its place."""

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def add(self, update: Update) -> None:
        self.count += 1
        self.text += update.text
        if update.token_id is not None:
            self.tokens.append(update.token_id)
            if update.logprob is not None:
                self.logprobs.append(update.logprob)
                if update.top_logprobs is not None:
                    self.likeliest.append(update.top_logprobs)
        if update.finish_reason is not None:
            self.finish_reason = str(update.finish_reason)
            self.error = update.request.error
            self.decode_s = update.request.decode_s

    def begin(self, request: Request) -> None:
        """Note what is known of a prompt when it was read."""
        self.start = Start.of(request)

    def extend(self, later: Part) -> None:
        """Add what came behind it."""
        self.count += later.count
        self.text += later.text
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.decode_s = later.decode_s
        self.start = self.start or later.start
        self.logprobs += later.logprobs
        self.likeliest += later.likeliest

    def packed(self) -> tuple[Any, ...]:
        """Return what ``Part`` makes the same of. It is short where there is little to tell."""
        told: tuple[Any, ...] = (self.count, self.text, self.tokens)
        if self.last or self.start is not None:
            told += (self.finish_reason, self.error, self.start, self.decode_s)
        elif self.logprobs:
            told += (None, None, None, 0.0)
        return (*told, self.logprobs, self.likeliest) if self.logprobs else told


GUIDES_AT_ONCE = 16
"""Threads that check guides: more than there can be guides that take long."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes of an engine. All of it can be pickled."""

    tokenizer: Any
    """None for a model without one."""
    shape: ModelShape
    room: RequestRoom
    max_batch_size: int
    why_batch_variant: str | None
    """The reason why a request's bits depend on its batch; None where they do not."""

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        engine, most = llm.engine, llm.config.max_batch_size
        shape = engine.sessions.model.shape
        return cls(llm.tokenizer, shape, engine.room, most, llm.why_batch_variant)


class Figures(NamedTuple):
    """What an engine does at a moment, and what it has done so far."""

    blocks: int
    held: int
    cached: int
    running: int
    waiting: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: tuple[int, ...]
    """How many steps had how many tokens, by the bounds of the engine's histogram."""
    step_tokens: float
    """The tokens of all steps."""
    drafts: int = 0
    drafted: int = 0
    """How many tokens all drafts had."""
    accepted_at: tuple[int, ...] = ()
    """How many drafts had their first token accepted, their second and so on. It is empty for an
    engine that drafts nothing."""

    @classmethod
    def at_first(cls, blocks: int) -> Figures:
        """Return those of an engine that has done nothing."""
        return cls(blocks, 0, 0, 0, 0, 0, 0, 0, (), 0.0)

    @classmethod
    def of(cls, engine: Engine) -> Figures:
        speculation, steps = engine.speculation, engine.step_tokens
        drafts = (
            (speculation.num_drafts, speculation.num_drafted, tuple(speculation.accepted_at))
            if speculation
            else ()
        )
        return cls(
            *engine.occupancy,
            engine.num_running,
            engine.num_waiting,
            engine.prefix_queries,
            engine.prefix_hits,
            engine.num_preemptions,
            tuple(steps.counts),
            steps.total,
            *drafts,
        )


class Texts(Protocol):
    """Texts of one task, which must ``leave`` in the end: those that have not ended are cancelled.

    They are numbered from 0, in the order in which they are added.
    """

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> None: ...

    async def next(self) -> list[tuple[int, Part]]:
        """Wait for something to come, and return all of it: a part for each text that has one."""

    def leave(self) -> None: ...


class ServedEngine(Protocol):
    """An engine that serves the tasks of one loop."""

    @property
    def apart(self) -> bool:
        """True if it shares no interpreter with what it serves."""

    @property
    def facts(self) -> Facts: ...

    @property
    def figures(self) -> Figures: ...

    @property
    def closed(self) -> bool:
        """True if nothing is served any more: it was closed, or the engine has stopped."""

    @property
    def restarting(self) -> bool:
        """True while the engine's process is started again, after one that has ended."""

    @property
    def restarts(self) -> int:
        """Times that the engine's process was started again."""

    @property
    def stalled_s(self) -> float:
        """Seconds without a step though there is work; 0 where nobody watches that."""

    async def open(self) -> None:
        """Begin to listen, in the loop that serves."""

    def texts(self) -> Texts: ...

    async def check_guide(self, guide: Guide) -> None:
        """Raise for a guide that cannot be followed. One that can is prepared then."""

    def close(self) -> None:
        """End it, and the texts that are left with an error. Any other thread may call this."""


# Errors that another process is to raise, and one where something does not go there.


def portable(error: BaseException) -> Exception:
    """Return what can be pickled and says the same.

    Where an error that nobody raised on purpose came from is said here, since that stays behind.
    Its message is left out then: a prompt may be in it.
    """
    if isinstance(error, RoseinferError):
        return error
    kind = type(error).__name__
    where = "".join(traceback.format_tb(error.__traceback__))
    print(f"the engine: {kind}\n{where}", file=sys.stderr, flush=True)
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever it is made of does not go
        pass
    return RuntimeError(f"{kind}: {error}")


def tokenizer_stays(error: Exception) -> ConfigError:
    """Return the error of a server whose engine cannot hand it the model's tokenizer."""
    return ConfigError(
        "the model's tokenizer cannot go from the engine's process to the server's "
        f"({type(error).__name__}: {error}): save it as one that transformers loads by itself, or "
        "serve the model from Python with AsyncLLM, which needs one process"
    )


# What is loaded when a server begins to serve, and stays until it ends.


def keep_loaded() -> None:
    """Have garbage collection look at nothing any more that is there now.

    Libraries leave hundreds of thousands of objects, and what is made for tokens has all of them
    looked through again and again: that takes longer than all that is done for a token.
    """
    gc.collect()
    gc.freeze()
