"""Prompt encoding: texts and messages to token ids, and checks of their length."""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Queue
from threading import Lock, Thread, Timer, get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from roseinfer.errors import BadArgument, ConfigError, EngineStopped
from roseinfer.server.api_errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.engine_client.protocol import EngineInfo

_MAX_INLINE_SIZE = 1000
"""Characters or tokens of prompts that are encoded inline: a thread takes longer to wake up."""
_MAX_SHARED_SIZE = 1 << 15
"""Characters or tokens of a request, at most, for the first thread; larger ones use the second.
Encoding them takes 10 to 80 ms of a core."""
_JOIN_S = 1.0
"""Seconds that a thread may take to end; one that takes longer ends with the process."""
_TEMPLATE_TIMEOUT_S = 5.0
"""Seconds that a chat template may take for the messages of a request."""
_MAX_CHARACTERS_PER_TOKEN = 64
"""Characters per token of a prompt, at most, if no token of the vocabulary is longer. Tokenizers
that drop spaces, or have one token for unknown text, could exceed it."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt."""

    token_ids: list[int]
    max_new_tokens: int
    """Tokens that can be generated after it, at most."""


class PromptEncoder:
    """Encoder of prompts: short ones inline, long ones in a thread, huge ones in a second thread.

    So a huge prompt delays neither streams nor other prompts. A tokenizer in Python has one thread
    for all prompts, since it may not be thread-safe.
    """

    def __init__(
        self, info: EngineInfo, max_generated_tokens: int | None, chat_template: str | None
    ) -> None:
        self._tokenizer: Any = info.tokenizer
        self._limits = info.request_limits
        self._shape = info.shape
        self._max_prompt_tokens = max_generated_tokens
        self._chat_template = chat_template or getattr(info.tokenizer, "chat_template", None)
        self._check_template()
        max_tokens = self._limits.max_new_tokens_after(1) + 1
        max_token_length = max(map(len, getattr(self._tokenizer, "get_vocab", dict)()), default=0)
        self._max_characters = min(max_tokens, max_generated_tokens or max_tokens) * max(
            max_token_length, _MAX_CHARACTERS_PER_TOKEN
        )
        self._parallel = getattr(self._tokenizer, "is_fast", False)
        """True if the tokenizer is thread-safe."""
        self._worker = self._huge_worker = _WorkerThread("roseinfer-prompts")
        if self._parallel:
            # The first call may disable truncation and padding, and so changes the tokenizer; later
            # calls do not, and can run in parallel.
            with suppress(ApiError):
                self._encode("", "prompt")
            self._huge_worker = _WorkerThread("roseinfer-huge-prompts")

    @property
    def can_chat(self) -> bool:
        return self._chat_template is not None

    async def encode(self, prompts: Sequence[str | list[int]], field: str) -> list[Prompt]:
        """Encode the prompts of a field of a body."""
        for each in prompts:
            if isinstance(each, str):
                self._check_num_characters(each, field)
        size = sum(map(len, prompts))
        if size <= _MAX_INLINE_SIZE and (self._parallel or not self._worker.busy):
            return [self._read(each, field) for each in prompts]
        return await self._run(size, [partial(self._read, each, field) for each in prompts])

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Prompt]:
        """Render messages and tools by the chat template, and encode the result as one prompt."""
        if not self.can_chat:
            raise ApiError(
                400,
                "the model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                param=field,
                code="no_chat_template",
            )
        if tools and isinstance(self._chat_template, str) and "tools" not in self._chat_template:
            message = "tools: the model's chat template does not support them; send no tools"
            raise ApiError(400, message, param="tools", code="no_tools_in_template")
        size = sum(len(str(value)) for each in (*messages, *tools) for value in each.values())
        return await self._run(size, [partial(self._render, messages, field, tools)])

    async def decode(self, prompts: Sequence[list[int]]) -> list[str]:
        """Return the texts of token ids."""
        size = sum(map(len, prompts))
        return await self._run(size, [partial(self._tokenizer.decode, each) for each in prompts])

    def abort(self) -> None:
        """Fail the prompts that are not encoded yet, and all later ones."""
        for worker in (self._worker, self._huge_worker):
            worker.stop()

    def close(self) -> None:
        """End the threads; leave one that still encodes: daemon threads end with the process."""
        self.abort()
        for worker in (self._worker, self._huge_worker):
            worker.join()

    async def _run(self, size: int, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run calls in a thread, chosen by their ``size`` in characters or tokens together.

        When one fails, or this task is cancelled, the calls that have not begun are dropped.
        """
        worker = self._worker if size <= _MAX_SHARED_SIZE else self._huge_worker
        futures = [worker.submit(call) for call in calls]
        try:
            return [await asyncio.wrap_future(each) for each in futures]
        finally:
            for each in futures:
                each.cancel()

    def _read(self, prompt: str | list[int], field: str) -> Prompt:
        token_ids = self._encode(prompt, field) if isinstance(prompt, str) else prompt
        return self._check_prompt(token_ids, field)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> Prompt:
        try:
            text = self._apply([dict(each) for each in messages], tools)
        except _CallTimeout:
            message = f"{field}: the chat template timed out after {_TEMPLATE_TIMEOUT_S:g} s"
            raise ApiError(400, message, param=field, code="invalid_value") from None
        except Exception as error:  # templates raise anything, as for roles in a wrong order
            message = f"{field}: the chat template failed: {error}"
            raise ApiError(400, message, param=field, code="invalid_value") from None
        return self._check_prompt(self._encode(text, field, add_special_tokens=False), field)

    def _check_template(self) -> None:
        """Raise if the template cannot render any chat, so that the server does not start."""
        if not isinstance(self._chat_template, str):
            return
        from jinja2 import TemplateSyntaxError

        try:
            self._apply([{"role": "user", "content": "Hello"}])
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"chat template: line {error.lineno}: {error.message}; use another one with "
                "--chat-template FILE"
            ) from None
        except _CallTimeout:
            raise ConfigError(
                f"chat template: timed out after {_TEMPLATE_TIMEOUT_S:g} s for one short message; "
                "use another one with --chat-template FILE"
            ) from None
        except Exception:  # about this message: others may render
            return

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> str:
        render = partial(
            self._tokenizer.apply_chat_template,
            messages,
            tools=[*tools] or None,
            chat_template=self._chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        text: str = _call_with_timeout(_TEMPLATE_TIMEOUT_S, render)
        return text

    def _encode(self, text: str, field: str, **options: Any) -> list[int]:
        self._check_num_characters(text, field)
        try:
            ids: list[int] = self._tokenizer.encode(text, **options)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in Rust is not an Exception
            message = f"{field}: the tokenizer cannot encode this text"
            raise ApiError(400, message, param=field, code="invalid_value") from None
        return ids

    def _check_num_characters(self, text: str, field: str) -> None:
        """Refuse a text that has too many characters for any encoding: encoding it takes long."""
        if len(text) > self._max_characters:
            message = f"{field}: the prompt has {len(text)} characters; the limit is "
            message += f"{self._max_characters}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    def _check_prompt(self, token_ids: list[int], field: str) -> Prompt:
        count = len(token_ids)
        if self._max_prompt_tokens is not None and count > self._max_prompt_tokens:
            message = f"this server's limit is {self._max_prompt_tokens}"
            raise self._too_long(message, count, field)
        room = self._limits.max_new_tokens_after(count)
        if room < 1:
            limit = self._limits.max_new_tokens_after(1)
            raise self._too_long(f"the limit is {limit}, and one generated token", count, field)
        try:
            self._shape.check_tokens(token_ids)
        except BadArgument as error:
            raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from None
        return Prompt(token_ids, room)

    @staticmethod
    def _too_long(limit: str, count: int, field: str) -> ApiError:
        message = f"{field}: the prompt has {count} tokens; {limit}"
        return ApiError(400, message, param=field, code="context_length_exceeded")


class _CallTimeout(BaseException):
    """Error that ends a call after a timeout. Templates may catch Exception, but not this."""


def _call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """Return a call's result; after ``seconds``, raise ``_CallTimeout`` in its Python code."""
    thread, lock, running = ctypes.c_ulong(get_ident()), Lock(), True

    def end() -> None:
        with lock:
            if running:
                exception = ctypes.py_object(_CallTimeout)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, exception)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        return call()
    finally:
        with lock:  # a later timeout would end whatever this thread runs next
            running = False
        timer.cancel()


class _WorkerThread:
    """Thread that runs calls one after the other.

    It is a daemon thread: the end of the process does not wait for it, as it would for an executor.
    """

    def __init__(self, name: str) -> None:
        self._calls: Queue[tuple[Future[Any], Callable[[], Any]] | None] = Queue()
        self._open: set[Future[Any]] = set()
        """Futures that are not done."""
        self._stopped = False
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a call runs or is queued, even if its future was cancelled."""
        return self._calls.unfinished_tasks > 0

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call and return its future, which can be cancelled."""
        future: Future[Result] = Future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._calls.put((future, call))
        if self._stopped:
            self.stop()
        return future

    def stop(self) -> None:
        """Fail every future that is not done, now and later. Any thread may call this."""
        self._stopped = True
        for future in [*self._open]:
            with suppress(InvalidStateError):
                future.set_exception(EngineStopped("the engine was closed"))

    def join(self) -> None:
        self._calls.put(None)
        self._thread.join(_JOIN_S)

    def _work(self) -> None:
        while self._run_next():
            self._calls.task_done()

    def _run_next(self) -> bool:
        """Run the next call; return False if the thread shall end instead."""
        item = self._calls.get()
        if item is None:
            return False
        future, call = item
        if not future.done():
            with suppress(InvalidStateError):  # the future was cancelled or failed meanwhile
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        return True
