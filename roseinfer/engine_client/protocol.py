"""Protocol between a server and an engine, in-process or in a subprocess."""

from __future__ import annotations

import pickle
import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from roseinfer.errors import ConfigError, RoseinferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine.engine import Engine, Update
    from roseinfer.engine.request import Request, RequestLimits
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM
    from roseinfer.models.shape import ModelShape
    from roseinfer.sampling_params import SamplingParams

# Output of a request since the last read.


TopLogprobs = list[tuple[int, float]]
"""Tokens with their logprobs."""


class PrefillStats(NamedTuple):
    """Figures of a prompt's prefill, sent with the first token."""

    cached_tokens: int
    """Prompt tokens served from the prefix cache."""
    queued_s: float
    """Seconds in the engine's queue, before the first step with some of its tokens."""
    prefill_s: float
    """Seconds from the start of that step to the first token."""
    logprobs: list[float | None]
    """Logprobs of the prompt's tokens; empty if not requested."""

    @classmethod
    def of(cls, request: Request) -> PrefillStats:
        start, first = request.started_at, request.first_token_at
        assert start is not None
        assert first is not None
        return cls(
            min(request.num_cached_tokens, request.prompt_length),
            start - request.queued_at,
            first - start,
            list(request.prompt_logprobs) if request.params.prompt_logprobs else [],
        )


@dataclass(slots=True)
class OutputDelta:
    """Merged updates of one request. Its reader raises the error."""

    count: int = 0
    """Number of merged updates."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    prefill_stats: PrefillStats | None = None
    """Figures of the prefill, with the first token; else None."""
    decode_s: float = 0.0
    """Seconds from the first token to the last, in the final delta; else 0."""
    logprobs: list[float] = field(default_factory=list)
    """Logprobs of the tokens; empty if not requested."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Top tokens at each position with their logprobs; empty if not requested."""

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def add(self, update: Update) -> None:
        self.count += 1
        self.text += update.text
        if update.token_id is not None:
            self.tokens.append(update.token_id)
            if update.logprob is not None:
                self.logprobs.append(update.logprob)
                if update.top_logprobs is not None:
                    self.top_logprobs.append(update.top_logprobs)
        if update.finish_reason is not None:
            self.finish_reason = str(update.finish_reason)
            self.error = update.request.error
            self.decode_s = update.request.decode_s

    def set_prefill_stats(self, request: Request) -> None:
        """Set the figures of the prefill."""
        self.prefill_stats = PrefillStats.of(request)

    def extend(self, later: OutputDelta) -> None:
        """Append the next delta of the request."""
        self.count += later.count
        self.text += later.text
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.decode_s = later.decode_s
        self.prefill_stats = self.prefill_stats or later.prefill_stats
        self.logprobs += later.logprobs
        self.top_logprobs += later.top_logprobs

    def to_tuple(self) -> tuple[Any, ...]:
        """Return arguments of ``OutputDelta`` that make an equal delta, without final defaults."""
        values: tuple[Any, ...] = (self.count, self.text, self.tokens)
        if self.is_final or self.prefill_stats is not None:
            values += (self.finish_reason, self.error, self.prefill_stats, self.decode_s)
        elif self.logprobs:
            values += (None, None, None, 0.0)
        return (*values, self.logprobs, self.top_logprobs) if self.logprobs else values


MAX_GUIDE_CHECKS = 16
"""Threads that check guides: more than there can be slow checks at a time."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Constant properties of an engine, which can be pickled."""

    tokenizer: Any
    """None for a model without one."""
    shape: ModelShape
    request_limits: RequestLimits
    max_batch_size: int
    batch_variance_reason: str | None
    """Reason why a request's bits depend on its batch; None if they do not."""

    @classmethod
    def of(cls, llm: LLM) -> EngineInfo:
        engine, max_batch_size = llm.engine, llm.config.max_batch_size
        shape = engine.sequence_runner.model.shape
        return cls(
            llm.tokenizer, shape, engine.request_limits, max_batch_size, llm.batch_variance_reason
        )


class EngineStats(NamedTuple):
    """Current state of an engine, and totals since its start."""

    blocks: int
    num_held: int
    num_cached: int
    running: int
    waiting: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: tuple[int, ...]
    """Number of steps per bucket of the engine's histogram of tokens per step."""
    step_tokens: float
    """Tokens of all steps."""
    drafts: int = 0
    drafted: int = 0
    """Tokens of all drafts."""
    num_accepted_per_position: tuple[int, ...] = ()
    """Number of drafts whose token at each position was accepted; empty without speculation."""

    @classmethod
    def initial(cls, blocks: int) -> EngineStats:
        """Return the stats of an engine that has not run any step."""
        return cls(blocks, 0, 0, 0, 0, 0, 0, 0, (), 0.0)

    @classmethod
    def of(cls, engine: Engine) -> EngineStats:
        speculation, steps = engine.speculation, engine.step_tokens
        drafts = (
            (
                speculation.num_drafts,
                speculation.num_draft_tokens,
                tuple(speculation.num_accepted_per_position),
            )
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


class RequestGroup(Protocol):
    """Requests of one task, numbered from 0 in the order of ``add``.

    The task must call ``cancel`` in the end, which cancels the requests that have not ended.
    """

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> None: ...

    async def next(self) -> list[tuple[int, OutputDelta]]:
        """Wait for new output, and return it by number: one delta for each request with output."""

    def cancel(self) -> None: ...


class EngineClient(Protocol):
    """Client of an engine, for the tasks of one event loop."""

    @property
    def separate_process(self) -> bool:
        """True if the engine does not share this process's interpreter."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def closed(self) -> bool:
        """True if no request is served any more: the client was closed, or the engine stopped."""

    @property
    def restarting(self) -> bool:
        """True while a new process of the engine starts, after the last one ended."""

    @property
    def restarts(self) -> int:
        """Number of restarts of the engine's process."""

    @property
    def stalled_s(self) -> float:
        """Seconds without a step although there is work; 0 for in-process clients."""

    async def open(self) -> None:
        """Connect to the engine, in the event loop of its tasks."""

    def open_group(self) -> RequestGroup: ...

    async def check_guide(self, guide: Guide) -> None:
        """Raise if the engine cannot follow a guide; else prepare it."""

    def close(self) -> None:
        """Close the client, and fail its open requests. Any other thread may call this."""


# Transfer of errors and of the tokenizer between processes.


def to_picklable_error(error: BaseException) -> Exception:
    """Return the error, or an equivalent one that can be pickled.

    The traceback of an unexpected error is printed here, since it is not pickled. Its message is
    not printed: it may contain a prompt.
    """
    if isinstance(error, RoseinferError):
        return error
    kind = type(error).__name__
    frames = "".join(traceback.format_tb(error.__traceback__))
    print(f"engine: {kind}\n{frames}", file=sys.stderr, flush=True)
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # it cannot be pickled, for any reason
        pass
    return RuntimeError(f"{kind}: {error}")


def tokenizer_transfer_error(error: Exception) -> ConfigError:
    """Return the error of a tokenizer that cannot be sent from the engine's process."""
    return ConfigError(
        "tokenizer: cannot be sent from the engine's process to the server's "
        f"({type(error).__name__}: {error}); save it as one that transformers loads without custom "
        "code, or serve the model from Python with AsyncLLM, which needs one process"
    )
