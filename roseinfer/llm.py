"""Offline generation: ``LLM("gpt2").generate(["Once upon"])``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from operator import index
from typing import TYPE_CHECKING, Any

from roseinfer.config import MAX_UNREAD_UPDATES, RESUME_UNREAD_UPDATES, EngineConfig
from roseinfer.engine.engine import Engine
from roseinfer.engine.request import NON_PROMPT_TYPES
from roseinfer.errors import (
    BadArgument,
    ConfigError,
    EngineStopped,
    RanksFailed,
    RoseinferError,
    did_you_mean,
)
from roseinfer.models.loading import load
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import track_progress

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from types import FrameType

    from torch import Tensor

    from roseinfer.distributed.ranks import LeadingRank
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

    Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The completion of one prompt."""

    prompt: Prompt
    token_ids: list[int]
    """Generated tokens, including the one that ended the text."""
    text: str | None
    """Text of the completion; None for a model without a tokenizer."""
    finish_reason: str
    """Reason of the end: ``stop``, ``length``, ``cancelled`` or ``error``."""
    logprobs: list[float] | None = None
    """Log-probability of each token; None if not requested."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Most probable tokens at each position and their log-probabilities; None if not requested."""
    prompt_logprobs: list[float | None] | None = None
    """Log-probability of each prompt token, None for the first one; None if not requested."""
    error: str | None = None
    """Message of the error that ended the request; None if none did."""


class LLM:
    """A language model, its tokenizer and the engine that runs it.

    ``model`` is ``"tiny"``, a local directory, a hub id, or a transformers model (then with
    its ``tokenizer``, if it has one). Other keywords are fields of ``EngineConfig``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        *,
        device: str | None = None,
        dtype: str | None = None,
        tokenizer: Any = None,
        **config: Any,
    ) -> None:
        option_names = [each.name for each in fields(EngineConfig)]
        for name in config.keys() - set(option_names):
            raise ConfigError(f"LLM: unknown setting {name!r}{did_you_mean(name, option_names)}")
        self.config = EngineConfig(**config)
        self.ranks: LeadingRank | None = None
        """Ranks of a tensor-parallel model; None without tensor parallelism."""
        if self.config.tensor_parallel_size > 1:
            from roseinfer.distributed.follower import lead_ranks

            self.ranks = lead_ranks(model, self.config, device, dtype)
            weakref.finalize(self, self.ranks.shut_down)
        placement: dict[str, Any] = {"device": device, "dtype": dtype, "ranks": self.ranks}
        try:
            loaded = load(model, self.config, tokenizer=tokenizer, **placement)
            self.engine = Engine(loaded, self.config)
        except BaseException as error:
            if self.ranks is None:
                raise
            failure = self.ranks.mark_failed(error)  # ends the others, which may wait for this one
            if isinstance(error, RanksFailed):
                raise failure from error
            raise
        self.tokenizer = loaded.tokenizer
        self._unread_updates: dict[int, deque[Update]] = {}
        self._num_open_uses = 0
        """Number of open calls and streams, all in the thread ``_user_thread``."""
        self._user_thread = 0
        self._use_lock = threading.RLock()  # a stream may be finalized while this is held
        self._process = os.getpid()

    @property
    def batch_invariant(self) -> bool:
        """True if a request gets the same bits whatever else is in its batch."""
        return self.engine.sequence_runner.model.batch_invariant

    @property
    def batch_variance_reason(self) -> str | None:
        """The reason, in words, why ``batch_invariant`` is False; None if it is True."""
        return self.engine.sequence_runner.model.batch_variance_reason

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt, text or token ids, and return the outputs in order.

        A prompt that cannot be served gets an output with its ``error``, and the others continue.
        ``progress`` shows a bar on a terminal, where it is the default, and lines elsewhere.
        """
        prompt_list = _as_prompts(prompts)
        params = _as_params(params, len(prompt_list))
        if not (progress is None or isinstance(progress, bool)):
            raise BadArgument(f"progress must be True, False or None, not {progress!r}")
        outputs: list[RequestOutput | None] = [None] * len(prompt_list)
        unfinished: dict[int, int] = {}
        """Indices in ``outputs`` of the requests that have not ended, by request id."""
        shown = sys.stderr.isatty() if progress is None else progress
        tracking = (
            track_progress(len(prompt_list), "generating", "requests")
            if shown
            else nullcontext(int)
        )
        with self.exclusive_use(), tracking as done, self._requests() as requests:
            unsubmitted = deque(enumerate(zip(prompt_list, params, strict=True)))
            while unsubmitted or unfinished:
                # Submit only what the next step can use; the rest while the GPU computes.
                while unsubmitted and not self.engine.has_full_lookahead:
                    at, (prompt, prompt_params) = unsubmitted.popleft()
                    try:
                        with defer_interrupts():
                            requests.append(self.engine.submit(prompt, prompt_params))
                    except RoseinferError as error:
                        outputs[at] = RequestOutput(prompt, [], None, "error", error=str(error))
                        done()
                    else:
                        unfinished[requests[-1].id] = at
                for update in self._step():
                    request = update.request
                    if request.finish_reason is not None and request.id in unfinished:
                        at = unfinished.pop(request.id)
                        outputs[at] = new_request_output(request, prompt_list[at])
                        done()
        return [output for output in outputs if output is not None]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Update, None, None]:
        """Continue one prompt and yield its updates.

        Leaving the loop early cancels the request.
        """
        with self.exclusive_use(), self._requests() as requests:
            with defer_interrupts():
                request = self.engine.submit(prompt, SamplingParams() if params is None else params)
                requests.append(request)
                unread = self._unread_updates[request.id] = deque()
            while request.finish_reason is None or unread:
                while unread:
                    update = unread.popleft()
                    if len(unread) == RESUME_UNREAD_UPDATES:
                        with defer_interrupts():
                            self.engine.resume(request)
                    yield update
                if request.finish_reason is None:
                    self._step()
        if request.error is not None:
            raise request.error

    def update_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace weights, all of ``values`` or none, and forget all cached prefixes.

        Names and shapes are those of the transformers model's parameters, as in a checkpoint.
        Refused while a stream of this ``LLM`` is open.
        """
        with self.exclusive_use():
            if self.ranks is not None:
                raise BadArgument(
                    "update_weights: the weights of several ranks are shards; make another LLM, or "
                    "use one GPU"
                )
            self.engine.update_weights(values)

    @property
    def is_forked(self) -> bool:
        """True in a process forked from the one that created this ``LLM``."""
        return os.getpid() != self._process

    def require_not_forked(self) -> None:
        """Raise in a forked process, where a step would wait for threads that do not exist."""
        if self.is_forked:
            raise EngineStopped(
                f"this LLM was made in process {self._process}, and this process is a fork of it: "
                "the engine's threads, its locks and its GPU stayed there; make the LLM in the "
                "process that uses it, and start processes by 'spawn' once an LLM exists"
            )

    @contextmanager
    def exclusive_use(self) -> Iterator[None]:
        """Refuse other threads during the block, since two would take each other's tokens."""
        self.require_not_forked()
        this_thread = threading.get_ident()
        with self._use_lock:
            if self._num_open_uses and self._user_thread != this_thread:
                raise BadArgument(
                    "this LLM is in use by another thread, or by an AsyncLLM that is not closed; "
                    "give all prompts to one generate, or serve all threads with one AsyncLLM"
                )
            self._user_thread = this_thread
            self._num_open_uses += 1
        try:
            yield
        finally:
            if not self.is_forked:  # in a fork, the lock may be held for ever
                with self._use_lock:
                    self._num_open_uses -= 1

    def _step(self) -> list[Update]:
        """Run a step, and keep the updates of streams until they are read."""
        self.require_not_forked()
        with defer_interrupts():
            updates = self.engine.step()
            for update in updates if self._unread_updates else ():
                if (unread := self._unread_updates.get(update.request.id)) is not None:
                    unread.append(update)
                    if len(unread) >= MAX_UNREAD_UPDATES:
                        self.engine.pause(update.request)
        return updates

    @contextmanager
    def _requests(self) -> Iterator[list[Request]]:
        """Yield a list for requests, and cancel all in it at the end of the block."""
        requests: list[Request] = []
        try:
            yield requests
        finally:
            with defer_interrupts():
                for request in requests if not self.is_forked else []:
                    self._unread_updates.pop(request.id, None)
                    self.engine.cancel(request)  # has no effect on one that has ended


def new_request_output(request: Request, prompt: Prompt) -> RequestOutput:
    return RequestOutput(
        prompt=prompt,
        token_ids=request.token_ids,
        text=request.text.text_so_far if request.text else None,
        finish_reason=str(request.finish_reason),
        logprobs=request.logprobs if request.params.logprobs else None,
        top_logprobs=request.top_logprobs if request.params.top_logprobs else None,
        prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs else None,
        error=str(request.error) if request.error else None,
    )


def _as_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts, with one item for a single text or list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = None if isinstance(prompts, NON_PROMPT_TYPES) else list(prompts)
    except TypeError:
        items = None
    if items is None:
        raise BadArgument(
            f"prompts must be a text, token ids, or a list of these, not {prompts!r}"
        ) from None
    ids = [_token_id(item) for item in items]
    return [ids] if ids and None not in ids else items


def _token_id(value: Any) -> int | None:
    """Return a value as a token id, or None. An array of a single id is a prompt, not an id."""
    if getattr(value, "ndim", 0):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def _as_params(params: Any, count: int) -> Sequence[SamplingParams]:
    """Return the parameters of each of ``count`` prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)):
        raise BadArgument(
            "params must be SamplingParams, or a list of them with one for each prompt, not "
            f"{params!r}"
        )
    if len(params) != count:
        raise BadArgument(f"params has {len(params)} sampling parameters for {count} prompts")
    return params


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer the first Ctrl-C to the end of the block, when the state is consistent; not a second.

    Python may raise ``KeyboardInterrupt`` between any two instructions of the main thread, and
    the state is not consistent between all of them, in whatever order they are.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def record(number: int, frame: FrameType | None) -> None:
        arrived.append((number, frame))
        if len(arrived) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])
