"""Prompts as token ids, from texts and from messages, and whether there is room for them."""

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
from roseinfer.server.refusals import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.engine_client.protocol import Facts

_SHORT = 1000
"""Characters, or tokens, of prompts that are read at once: a thread would take longer to wake."""
_HUGE = 1 << 15
"""Characters, or tokens, of a request beyond which its prompts are read in a thread of their own:
10 to 80 ms of a core."""
_JOIN_S = 1.0
"""Seconds that a thread may take to end. One that reads for longer ends with the process."""
_TEMPLATE_S = 5.0
"""Seconds that a chat template may take for the messages of a request."""
_TOKEN_CHARACTERS = 64
"""Characters that a token stands for on average, at the most, where no token of the vocabulary is
longer. Tokenizers that drop spaces or have one token for unknown text could take more."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    room: int
    """How many tokens it can be continued by."""


class Prompts:
    """Reads prompts: short ones at once, long ones in a thread, and huge ones in another.

    So a huge prompt holds up neither streams nor other prompts. A tokenizer in Python has one
    thread for all prompts, since it may do one thing at a time.
    """

    def __init__(self, facts: Facts, most_tokens: int | None, chat_template: str | None) -> None:
        self._tokenizer: Any = facts.tokenizer
        self._room = facts.room
        self._shape = facts.shape
        self._most_tokens = most_tokens
        self._chat_template = chat_template or getattr(facts.tokenizer, "chat_template", None)
        self._refuse_no_template()
        most = self._room.most_new(1) + 1
        longest = max(map(len, getattr(self._tokenizer, "get_vocab", dict)()), default=0)
        self._most_characters = min(most, most_tokens or most) * max(longest, _TOKEN_CHARACTERS)
        self._parallel = getattr(self._tokenizer, "is_fast", False)
        """True if threads may share the tokenizer."""
        self._reader = self._huge_reader = _Reader("roseinfer-prompts")
        if self._parallel:
            # The first call may drop the truncation and padding of its file; later ones change
            # nothing.
            with suppress(Refused):
                self._encode("", "prompt")
            self._huge_reader = _Reader("roseinfer-huge-prompts")

    @property
    def can_chat(self) -> bool:
        return self._chat_template is not None

    async def of(self, prompts: Sequence[str | list[int]], field: str) -> list[Prompt]:
        """Return prompts that stood in a field of a body."""
        for each in prompts:
            if isinstance(each, str):
                self._refuse_characters(each, field)
        size = sum(map(len, prompts))
        if size <= _SHORT and (self._parallel or not self._reader.busy):
            return [self._read(each, field) for each in prompts]
        return await self._run(size, [partial(self._read, each, field) for each in prompts])

    async def of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Prompt]:
        """Return the prompt that the chat template makes of messages, and of tools."""
        if not self.can_chat:
            raise Refused(
                400,
                "this model came without a chat template: ask /v1/completions, or have the server "
                "started with --chat-template FILE",
                param=field,
                code="no_chat_template",
            )
        if tools and isinstance(self._chat_template, str) and "tools" not in self._chat_template:
            why = "the chat template says nothing of tools, so the model would not know of them"
            raise Refused(400, why, param="tools", code="no_tools_in_template")
        size = sum(len(str(value)) for each in (*messages, *tools) for value in each.values())
        return await self._run(size, [partial(self._render, messages, field, tools)])

    async def texts_of(self, prompts: Sequence[list[int]]) -> list[str]:
        """Return the texts of token ids."""
        size = sum(map(len, prompts))
        return await self._run(size, [partial(self._tokenizer.decode, each) for each in prompts])

    def cut(self) -> None:
        """Have prompts that are not read yet fail, and all that come later."""
        for reader in (self._reader, self._huge_reader):
            reader.stop()

    def close(self) -> None:
        """End the threads, or leave one that still reads: the process does not wait for it."""
        self.cut()
        for reader in (self._reader, self._huge_reader):
            reader.join()

    async def _run(self, size: int, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return what calls return, for so many characters or tokens together.

        When one fails, or nobody waits any more, those that have not begun are dropped.
        """
        reader = self._reader if size <= _HUGE else self._huge_reader
        done = [reader.submit(call) for call in calls]
        try:
            return [await asyncio.wrap_future(each) for each in done]
        finally:
            for each in done:
                each.cancel()

    def _read(self, prompt: str | list[int], field: str) -> Prompt:
        token_ids = self._encode(prompt, field) if isinstance(prompt, str) else prompt
        return self._checked(token_ids, field)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> Prompt:
        try:
            text = self._apply([dict(each) for each in messages], tools)
        except _Overdue:
            why = f"the chat template takes more than {_TEMPLATE_S:g} s for such messages"
            raise Refused(400, why, param=field, code="invalid_value") from None
        except Exception as error:  # templates raise what they like, as for roles in a wrong order
            why = f"the chat template takes no such messages: {error}"
            raise Refused(400, why, param=field, code="invalid_value") from None
        return self._checked(self._encode(text, field, add_special_tokens=False), field)

    def _refuse_no_template(self) -> None:
        """Raise for what no chat can be written by, so that no client is blamed for it later."""
        if not isinstance(self._chat_template, str):
            return
        from jinja2 import TemplateSyntaxError

        try:
            self._apply([{"role": "user", "content": "Hello"}])
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template cannot be read, line {error.lineno}: {error.message}; "
                "--chat-template FILE gives another"
            ) from None
        except _Overdue:
            raise ConfigError(
                f"the chat template takes more than {_TEMPLATE_S:g} s for one short message; "
                "--chat-template FILE gives another"
            ) from None
        except Exception:  # of this message: others may be taken
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
        text: str = _within(_TEMPLATE_S, render)
        return text

    def _encode(self, text: str, field: str, **options: Any) -> list[int]:
        self._refuse_characters(text, field)
        try:
            ids: list[int] = self._tokenizer.encode(text, **options)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in Rust is not an Exception
            why = f"{field}: the tokenizer cannot read this text"
            raise Refused(400, why, param=field, code="invalid_value") from None
        return ids

    def _refuse_characters(self, text: str, field: str) -> None:
        """Refuse a text that is too long by its characters alone: reading it would take long."""
        if len(text) > self._most_characters:
            why = f"{field}: a prompt of {len(text)} characters is too long: there is room for "
            why += f"{self._most_characters}, whatever its tokens are"
            raise Refused(400, why, param=field, code="context_length_exceeded")

    def _checked(self, token_ids: list[int], field: str) -> Prompt:
        count = len(token_ids)
        if self._most_tokens is not None and count > self._most_tokens:
            raise self._too_long(f"this server takes {self._most_tokens}", count, field)
        room = self._room.most_new(count)
        if room < 1:
            most = self._room.most_new(1)
            raise self._too_long(f"there is room for {most} and a new one", count, field)
        try:
            self._shape.check_tokens(token_ids)
        except BadArgument as error:
            raise Refused(400, f"{field}: {error}", param=field, code="invalid_value") from None
        return Prompt(token_ids, room)

    @staticmethod
    def _too_long(what: str, count: int, field: str) -> Refused:
        why = f"{field}: a prompt of {count} tokens is too long: {what}"
        return Refused(400, why, param=field, code="context_length_exceeded")


class _Overdue(BaseException):
    """Ends a call that takes too long. Templates catch Exception, which this is none of."""


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return what a call returns, or have it raise ``_Overdue`` between two steps of Python."""
    thread, lock, running = ctypes.c_ulong(get_ident()), Lock(), True

    def end() -> None:
        with lock:
            if running:
                overdue = ctypes.py_object(_Overdue)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, overdue)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        return call()
    finally:
        with lock:  # what comes later is not for what this thread does next
            running = False
        timer.cancel()


class _Reader:
    """A thread that makes calls one after the other. The end of the process does not wait for it,
    as it would for a thread of an executor.
    """

    def __init__(self, name: str) -> None:
        self._calls: Queue[tuple[Future[Any], Callable[[], Any]] | None] = Queue()
        self._open: set[Future[Any]] = set()
        """Results that somebody waits for."""
        self._stopped = False
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a call runs or waits, even one that nobody waits for any more."""
        return self._calls.unfinished_tasks > 0

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call and return its future, which can be cancelled."""
        done: Future[Result] = Future()
        self._open.add(done)
        done.add_done_callback(self._open.discard)
        self._calls.put((done, call))
        if self._stopped:
            self.stop()
        return done

    def stop(self) -> None:
        """Fail every call that has a waiter. Any thread may call this."""
        self._stopped = True
        for done in [*self._open]:
            with suppress(InvalidStateError):
                done.set_exception(EngineStopped("the engine was closed"))

    def join(self) -> None:
        self._calls.put(None)
        self._thread.join(_JOIN_S)

    def _work(self) -> None:
        while self._take():
            self._calls.task_done()

    def _take(self) -> bool:
        """Make the next call, and return False where there is none any more."""
        taken = self._calls.get()
        if taken is None:
            return False
        done, call = taken
        if not done.done():
            with suppress(InvalidStateError):  # somebody cancelled or stopped it meanwhile
                try:
                    result = call()
                except BaseException as error:
                    done.set_exception(error)
                else:
                    done.set_result(result)
        return True
