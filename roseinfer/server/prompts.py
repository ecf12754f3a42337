"""Prompts as token ids, from texts and from messages, and whether there is room for them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from roseinfer.errors import BadArgument, ConfigError
from roseinfer.server.refusals import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.engine_process.any_process import Facts

_SHORT = 1000
"""Characters, or tokens, of prompts that are read at once: a thread would take longer to wake."""
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
    """Reads prompts. Long ones have a thread, so that they hold up neither streams nor engine."""

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
        self._thread = ThreadPoolExecutor(1, "roseinfer-prompts")
        self._read_there: set[Future[Any]] = set()
        """What the thread has to do. A tokenizer does one thing at a time."""

    @property
    def can_chat(self) -> bool:
        return self._chat_template is not None

    async def of(self, prompts: Sequence[str | list[int]], field: str) -> list[Prompt]:
        """Return prompts that stood in a field of a body."""
        for each in prompts:
            if isinstance(each, str):
                self._refuse_characters(each, field)
        if sum(map(len, prompts)) <= _SHORT and not self._read_there:
            return self._read(prompts, field)
        return await self.run(self._read, prompts, field)

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
        return await self.run(self._render, messages, field, tools)

    def close(self) -> None:
        self._thread.shutdown()

    async def text_of(self, token_ids: list[int]) -> str:
        text: str = await self.run(self._tokenizer.decode, token_ids)
        return text

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        done = self._thread.submit(call, *arguments)
        self._read_there.add(done)
        done.add_done_callback(self._read_there.discard)
        return await asyncio.wrap_future(done)

    def _read(self, prompts: Sequence[str | list[int]], field: str) -> list[Prompt]:
        return [
            self._checked(self._encode(each, field) if isinstance(each, str) else each, field)
            for each in prompts
        ]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[Prompt]:
        try:
            text = self._apply([dict(each) for each in messages], tools)
        except Exception as error:  # templates raise what they like, as for roles in a wrong order
            why = f"the chat template takes no such messages: {error}"
            raise Refused(400, why, param=field, code="invalid_value") from None
        return [self._checked(self._encode(text, field, add_special_tokens=False), field)]

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
        except Exception:  # of this message: others may be taken
            return

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=[*tools] or None,
            chat_template=self._chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
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
