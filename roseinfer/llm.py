"""A model that continues prompts: ``LLM("gpt2").generate(["Once upon"])``."""

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

from roseinfer.config import MOST_UNREAD, RESUMED_AT, EngineConfig
from roseinfer.engine.engine import Engine
from roseinfer.engine.request import NO_PROMPTS
from roseinfer.errors import (
    BadArgument,
    ConfigError,
    EngineStopped,
    RanksFailed,
    RoseinferError,
    did_you_mean,
)
from roseinfer.models.loading import load
from roseinfer.progress import counting
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from types import FrameType

    from roseinfer.distributed.ranks import LeadingRank
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

    Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outcome of one prompt."""

    prompt: Prompt
    token_ids: list[int]
    """The generated tokens, with the one that ended the text."""
    text: str | None
    """None for a model without a tokenizer."""
    finish_reason: str
    """``stop``, ``length``, ``cancelled`` or ``error``."""
    logprobs: list[float] | None = None
    """One for each token, if asked for."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each token the likeliest at its place, each with its log-probability, if asked for."""
    prompt_logprobs: list[float | None] | None = None
    """One for each token of the prompt but the first, if asked for."""
    error: str | None = None
    """The message of the error that ended the request, if one did."""


class LLM:
    """A language model, its tokenizer and the engine that serves it.

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
        known = [each.name for each in fields(EngineConfig)]
        for name in config.keys() - set(known):
            raise ConfigError(f"an LLM takes no {name!r}{did_you_mean(name, known)}")
        self.config = EngineConfig(**config)
        self.ranks: LeadingRank | None = None
        """The processes that compute the model together, where there are several."""
        if self.config.tensor_parallel_size > 1:
            from roseinfer.distributed.follower import lead

            self.ranks = lead(model, self.config, device, dtype)
            weakref.finalize(self, self.ranks.let_go)
        places: dict[str, Any] = {"device": device, "dtype": dtype, "ranks": self.ranks}
        try:
            loaded = load(model, self.config, tokenizer=tokenizer, **places)
            self.engine = Engine(loaded, self.config)
        except BaseException as error:
            if self.ranks is None:
                raise
            failure = self.ranks.break_off(error)  # the others may wait for what does not come
            if isinstance(error, RanksFailed):
                raise failure from error
            raise
        self.tokenizer = loaded.tokenizer
        self._mail: dict[int, deque[Update]] = {}
        self._uses = 0
        """Calls and streams that are open, all in the thread ``_user``."""
        self._user = 0
        self._use_lock = threading.RLock()  # a stream may be finalised while it is held
        self._process = os.getpid()

    @property
    def batch_invariant(self) -> bool:
        """What a request gets has the same bits whatever else is in the batch."""
        return self.engine.sessions.model.batch_invariant

    @property
    def why_batch_variant(self) -> str | None:
        """The reason, in words, why ``batch_invariant`` is False; None where it is True."""
        return self.engine.sessions.model.why_batch_variant

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt, text or token ids, and return the outputs in their order.

        The output for a prompt that cannot be served says why; the others go on.
        ``progress`` shows a bar on a terminal, where it is the default, and lines elsewhere.
        """
        asked = _as_prompts(prompts)
        params = _as_params(params, len(asked))
        if not (progress is None or isinstance(progress, bool)):
            raise BadArgument(f"progress must be True, False or None, not {progress!r}")
        outputs: list[RequestOutput | None] = [None] * len(asked)
        waiting: dict[int, int] = {}
        """The indices in ``outputs`` of the requests that have not ended, by their ids."""
        shown = sys.stderr.isatty() if progress is None else progress
        counted = counting(len(asked), "generating", "requests") if shown else nullcontext(int)
        with self.in_use(), counted as done, self._requests() as requests:
            coming = deque(enumerate(zip(asked, params, strict=True)))
            while coming or waiting:
                # The others are taken in while the GPU computes what these make a step of.
                while coming and not self.engine.is_fed:
                    at, (prompt, own) = coming.popleft()
                    try:
                        with uninterrupted():
                            requests.append(self.engine.submit(prompt, own))
                    except RoseinferError as error:
                        outputs[at] = RequestOutput(prompt, [], None, "error", error=str(error))
                        done()
                    else:
                        waiting[requests[-1].id] = at
                for update in self._step():
                    request = update.request
                    if request.finish_reason is not None and request.id in waiting:
                        at = waiting.pop(request.id)
                        outputs[at] = output_of(request, asked[at])
                        done()
        return [output for output in outputs if output is not None]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Update, None, None]:
        """Continue one prompt and yield what every step brings.

        Leaving the loop early cancels the request.
        """
        with self.in_use(), self._requests() as requests:
            with uninterrupted():
                request = self.engine.submit(prompt, SamplingParams() if params is None else params)
                requests.append(request)
                arrived = self._mail[request.id] = deque()
            while request.finish_reason is None or arrived:
                while arrived:
                    update = arrived.popleft()
                    if len(arrived) == RESUMED_AT:
                        with uninterrupted():
                            self.engine.resume(request)
                    yield update
                if request.finish_reason is None:
                    self._step()
        if request.error is not None:
            raise request.error

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the one in which this ``LLM`` was made."""
        return os.getpid() != self._process

    def require_own_process(self) -> None:
        """Raise in a forked process, where a step would wait for threads that are not there."""
        if self.forked:
            raise EngineStopped(
                f"this LLM was made in process {self._process}, and this process is a fork of it: "
                "the engine's threads, its locks and its GPU stayed there. Make the LLM in the "
                "process that uses it, and start processes by 'spawn' once there is an LLM"
            )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Refuse other threads meanwhile: two would take each other's tokens."""
        self.require_own_process()
        me = threading.get_ident()
        with self._use_lock:
            if self._uses and self._user != me:
                raise BadArgument(
                    "this LLM is in use by another thread, or by an AsyncLLM that is not closed: "
                    "give all prompts to one generate, or serve all threads with one AsyncLLM"
                )
            self._user = me
            self._uses += 1
        try:
            yield
        finally:
            if not self.forked:  # another thread may have held the lock then, and never let go
                with self._use_lock:
                    self._uses -= 1

    def _step(self) -> list[Update]:
        """Run a step, and keep the updates of streams until they are asked for."""
        self.require_own_process()
        with uninterrupted():
            updates = self.engine.step()
            for update in updates if self._mail else ():
                if (mail := self._mail.get(update.request.id)) is not None:
                    mail.append(update)
                    if len(mail) >= MOST_UNREAD:
                        self.engine.pause(update.request)
        return updates

    @contextmanager
    def _requests(self) -> Iterator[list[Request]]:
        """Yield a list for requests, all of which end with the block, however it ends."""
        requests: list[Request] = []
        try:
            yield requests
        finally:
            with uninterrupted():
                for request in requests if not self.forked else []:
                    self._mail.pop(request.id, None)
                    self.engine.cancel(request)  # has no effect on one that has ended


def output_of(request: Request, prompt: Prompt) -> RequestOutput:
    return RequestOutput(
        prompt=prompt,
        token_ids=request.token_ids,
        text=request.text.so_far if request.text else None,
        finish_reason=str(request.finish_reason),
        logprobs=request.logprobs if request.params.logprobs else None,
        top_logprobs=request.top_logprobs if request.params.top_logprobs else None,
        prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs else None,
        error=str(request.error) if request.error else None,
    )


def _as_prompts(prompts: Any) -> list[Any]:
    """Return the prompts: a text is one of them, and so are token ids."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        found = None if isinstance(prompts, NO_PROMPTS) else list(prompts)
    except TypeError:
        found = None
    if found is None:
        raise BadArgument(
            f"prompts must be a text, token ids, or a list of these, not {prompts!r}"
        ) from None
    ids = [_token_id(each) for each in found]
    return [ids] if ids and None not in ids else found


def _token_id(one: Any) -> int | None:
    """Return the token id that something is, or None. An array of a single id is a prompt."""
    if getattr(one, "ndim", 0):
        return None
    try:
        return index(one)
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
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, when nothing is half done; but not a second.

    Python may raise ``KeyboardInterrupt`` between any two instructions of the main thread, and
    no order of them leaves the accounts right at each.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append((number, frame))
        if len(arrived) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])
