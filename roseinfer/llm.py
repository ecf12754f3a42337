"""A model that continues prompts: ``LLM("gpt2").generate(["Once upon"])``."""

from __future__ import annotations

import signal
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from roseinfer.config import EngineConfig, SamplingParams
from roseinfer.engine.engine import Engine
from roseinfer.engine.request import FinishReason
from roseinfer.errors import BadArgument, RoseinferError
from roseinfer.models.loading import load

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterator, Sequence
    from types import FrameType

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

    Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outcome of one prompt."""

    prompt: Prompt
    token_ids: list[int]
    """Generated, the token that ended the text included."""
    text: str | None
    """None for a model without a tokenizer."""
    finish_reason: str
    """``stop``, ``length``, ``cancelled`` or ``error``."""
    logprobs: list[float] | None = None
    """One for each token, if they were asked for."""
    error: str | None = None
    """The message of the error that ended it, if one did."""


class LLM:
    """A language model, its tokenizer and the engine that serves it.

    ``model`` is ``"tiny"``, a local directory, a hub id, or a transformers model (then with
    its ``tokenizer``, if it has one). More keywords are those of ``EngineConfig``.
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
        self.config = EngineConfig(**config)
        loaded = load(model, self.config, device=device, dtype=dtype, tokenizer=tokenizer)
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(
            loaded.model,
            loaded.kv,
            self.config,
            tokenizer=loaded.tokenizer,
            end_tokens=loaded.end_tokens,
        )
        self._mail: dict[int, deque[Update]] = {}
        self._uses = 0
        """Calls and streams that are open, all of one thread."""
        self._user = 0
        self._counting = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt, text or token ids; the outputs come in their order.

        A prompt that cannot be served gets an output that says why; the others go on.
        ``progress`` shows a bar; by default where the output is a terminal.
        """
        asked = _as_list(prompts)
        each = _for_each(params, len(asked))
        outputs: list[RequestOutput | None] = [None] * len(asked)
        waiting: dict[int, int] = {}
        with self.in_use(), _bar(len(asked), progress) as bar, self._undisturbed() as requests:
            for at, (prompt, own) in enumerate(zip(asked, each, strict=True)):
                outputs[at] = self._submit(prompt, own, requests)
                if outputs[at] is None:
                    waiting[requests[-1].id] = at
                else:
                    bar.update()
            while waiting:
                for update in self._step():
                    request = update.request
                    if request.finish_reason is not None and request.id in waiting:
                        at = waiting.pop(request.id)
                        outputs[at] = output_of(request, asked[at])
                        bar.update()
        return [output for output in outputs if output is not None]

    def _submit(
        self, prompt: Prompt, params: SamplingParams, requests: list[Request]
    ) -> RequestOutput | None:
        """Queue one more of the requests, or return why it cannot be served."""
        try:
            with uninterrupted():
                requests.append(self.engine.submit(prompt, params))
        except RoseinferError as error:
            return RequestOutput(prompt, [], None, str(FinishReason.ERROR), error=str(error))
        return None

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Update, None, None]:
        """Continue one prompt and yield what every step brings.

        Leaving the loop early cancels the request.
        """
        with self.in_use(), self._undisturbed() as requests:
            with uninterrupted():
                request = self.engine.submit(prompt, params or SamplingParams())
                requests.append(request)
                arrived = self._mail[request.id] = deque()
            while request.finish_reason is None or arrived:
                while arrived:
                    yield arrived.popleft()
                if request.finish_reason is None:
                    self._step()
        if request.error is not None:
            raise request.error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """One thread at a time: two would take each other's tokens."""
        me = threading.get_ident()
        with self._counting:
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
            with self._counting:
                self._uses -= 1

    def _step(self) -> list[Update]:
        """A step for everybody: streams that wait meanwhile find what it brought them."""
        with uninterrupted():
            updates = self.engine.step()
            for update in updates:
                if update.request.id in self._mail:
                    self._mail[update.request.id].append(update)
        return updates

    @contextmanager
    def _undisturbed(self) -> Iterator[list[Request]]:
        """Requests that end with the call that made them, however that ends."""
        requests: list[Request] = []
        try:
            yield requests
        finally:
            with uninterrupted():
                for request in requests:
                    self._mail.pop(request.id, None)
                    self.engine.cancel(request)  # nothing to one that has ended


def output_of(request: Request, prompt: Prompt) -> RequestOutput:
    assert request.finish_reason is not None
    return RequestOutput(
        prompt=prompt,
        token_ids=request.token_ids,
        text=request.text.so_far if request.text else None,
        finish_reason=str(request.finish_reason),
        logprobs=request.logprobs if request.params.logprobs else None,
        error=str(request.error) if request.error else None,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text is one prompt; so are token ids that stand alone."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        found: list[Any] = list(prompts)
    except TypeError:
        raise BadArgument(
            f"prompts are a text, token ids, or several of these, not {prompts!r}"
        ) from None
    alone = bool(found) and all(isinstance(each, int) for each in found)
    return [found] if alone else found


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise BadArgument(f"{len(params)} sampling parameters for {count} prompts")
    return list(params)


def _bar(total: int, progress: bool | None) -> Any:
    disable = None if progress is None else not progress
    return tqdm(total=total, desc="generating", unit="request", disable=disable)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, when nothing is half done; a second one does not.

    Python raises ``KeyboardInterrupt`` between any two instructions, and no order of them
    leaves accounts right at each. It does so in the main thread alone.
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
