"""Responses with choices: shared code of completions and chat completions."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Discriminator, Field, StringConstraints, Tag

from roseinfer.guided.guide import Guide
from roseinfer.server.api_errors import to_api_error
from roseinfer.server.schemas.validation import StrictModel, value_error
from roseinfer.server.streaming import (
    BYTES_PER_TURN,
    DONE,
    LOGPROBS_PER_TURN,
    EncodedJson,
    LoopYielder,
    encode_any,
    encode_finite,
    encode_items,
    event,
    iter_json,
    join_items,
)
from roseinfer.text.decoder_chain import BYTE_TOKEN
from roseinfer.text.detokenizer import BYTE_OF

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from roseinfer.engine_client.protocol import TopLogprobs
    from roseinfer.server.generation import ChoiceDelta, Generation
    from roseinfer.server.schemas.validation import ChoicesRequestBody

# Texts of single tokens, and their logprobs in OpenAI's format.


class TokenTexts:
    """Text and bytes of single tokens, decoded at first use."""

    def __init__(self, tokenizer: Any) -> None:
        # Imported here: it imports transformers, which would delay the start of the HTTP server.
        from roseinfer.text.completion_text import new_detokenizer_factory

        self._tokenizer = tokenizer
        self._cached_texts: dict[int, tuple[str, list[int]]] = {}
        self._special: dict[int, str] = {}
        self.detokenizer = new_detokenizer_factory(tokenizer)
        """Factory of detokenizers, each for one completion, like those of the engine."""

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        if token not in self._cached_texts:
            self._cached_texts[token] = self._look_up(token)
        return self._cached_texts[token]

    def special(self, token: int) -> str:
        """Return the text of a special token, which only prompts show; empty for other tokens."""
        if token not in self._special:
            shown = self._tokenizer.decode([token], skip_special_tokens=True)
            self._special[token] = "" if shown else self[token][0]
        return self._special[token]

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        text: str = self._tokenizer.decode([token])
        if "\N{REPLACEMENT CHARACTER}" in text:  # part of a character
            data = _bytes_of(self._tokenizer.convert_ids_to_tokens(token) or "")
            if data:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)
        return text, list(text.encode())

    def chat_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[TopLogprobs]
    ) -> dict[str, list[Any]]:
        """Return the logprobs of tokens in the format of chat completions."""
        tops = top_logprobs or [[]] * len(tokens)
        content = [
            self._logprob_object(token, logprob)
            | {
                "top_logprobs": [
                    self._logprob_object(other, other_logprob) for other, other_logprob in top
                ]
            }
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]
        return {"content": content}

    def completion_logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top_logprobs: Sequence[TopLogprobs] | None,
        offsets: list[int],
    ) -> dict[str, list[Any]]:
        """Return the logprobs of tokens, which begin at ``offsets``, in the format of completions.

        ``top_logprobs`` is None if logprobs of other tokens are not requested.
        """
        lists: dict[str, list[Any]] = {
            "tokens": [self[token][0] for token in tokens],
            "token_logprobs": [*logprobs],
            "text_offset": offsets,
        }
        if top_logprobs is not None:
            lists["top_logprobs"] = [
                None
                if logprob is None
                else {
                    self[other][0]: other_logprob
                    for other, other_logprob in (*top, (token, logprob))
                }
                for token, logprob, top in zip(tokens, logprobs, top_logprobs, strict=True)
            ]
        return lists

    def _logprob_object(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self[token]
        return {"token": text, "logprob": logprob, "bytes": data}


def _bytes_of(written: str) -> bytes:
    """Return the bytes of a token that is a part of a character; empty if they are unknown."""
    if match := BYTE_TOKEN.fullmatch(written):
        return bytes([int(match[1], 16)])
    is_byte_level = all(character in BYTE_OF for character in written)
    return bytes(BYTE_OF[character] for character in written) if is_byte_level else b""


if TYPE_CHECKING:
    Lists = dict[str, list[Any]]


class ChoicesResponse(ABC):
    """Response with a list of choices, complete or in chunks."""

    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]

    def __init__(
        self, body: ChoicesRequestBody, generation: Generation, token_texts: TokenTexts
    ) -> None:
        self.generation = generation
        self.token_texts = token_texts
        self._stream_options = body.stream_options
        self._yielder = LoopYielder()
        self._encode = encode_any
        self._head = {
            "id": f"{self.PREFIX}-{uuid4().hex}",
            "object": self.OBJECT,
            "created": int(time.time()),
            "model": body.model,
        }

    @abstractmethod
    async def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return a choice of a complete response."""

    @abstractmethod
    async def part(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Return a choice of a chunk; None if the delta has no certain text, so needs no chunk."""

    async def json_parts(self) -> list[bytes]:
        self._encode = encode_finite
        choices = [
            EncodedJson([*iter_json(await self.choice(delta), self._encode)])
            for delta in await self.generation.collect_choices()
        ]
        whole = self._head | {"choices": choices, "usage": self._usage()}
        return [*iter_json(whole, self._encode)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        self._head["object"] = self.CHUNK_OBJECT
        options = self._stream_options
        continuous = options is not None and options.continuous_usage_stats
        include_usage = options is not None and options.include_usage
        async with aclosing(self.generation.bursts()) as bursts:
            async for burst in bursts:
                usage_so_far = self._usage() if continuous else None
                usage = {"usage": usage_so_far} if continuous or include_usage else {}
                chunks = bytearray()
                for delta in burst:
                    if (part := await self.part(delta)) is not None:
                        chunks += event(self._head | {"choices": [part]} | usage)
                    if len(chunks) >= BYTES_PER_TURN:
                        yield bytes(chunks)
                        await asyncio.sleep(0)
                        chunks.clear()
                if self.generation.finished:
                    if include_usage:
                        chunks += event(self._head | {"choices": [], "usage": self._usage()})
                    chunks += DONE
                if chunks:
                    yield bytes(chunks)

    def error_events(self, error: Exception) -> bytes:
        return event(to_api_error(error).body) + DONE

    async def lists(
        self,
        count: int,
        each: int,
        lists_of: Callable[[slice], Lists],
        before: Mapping[str, bytes] | None = None,
    ) -> dict[str, Any]:
        """Return the lists that ``lists_of`` makes of ``count`` tokens of ``each`` logprobs.

        They are encoded if they are long, or if they continue the encoded items ``before`` them.
        """
        if before is None and count * each <= LOGPROBS_PER_TURN:
            await self._yielder.after(count * each)
            return dict(lists_of(slice(0, count)))
        columns = await self.columns(count, each, lists_of)
        return {
            name: join_items((before or {}).get(name), items) for name, items in columns.items()
        }

    async def columns(
        self, count: int, each: int, lists_of: Callable[[slice], Lists]
    ) -> dict[str, bytes]:
        """Return the items of the lists as JSON; yield to the event loop between slices."""
        columns: dict[str, list[bytes]] = {}
        size = max(1, LOGPROBS_PER_TURN // each)
        for begin in range(0, max(1, count), size):
            for name, values in lists_of(slice(begin, begin + size)).items():
                columns.setdefault(name, []).append(encode_items(values, self._encode))
            await self._yielder.after(min(size, count - begin) * each)
        return {name: b",".join(filter(None, slices)) for name, slices in columns.items()}

    def _usage(self) -> dict[str, Any]:
        used = self.generation.usage
        return {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }


# Response formats: any text, JSON, or JSON of a schema.


_Name = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class TextFormat(StrictModel):
    """Response format of any text."""

    type: Literal["text"]

    def guide(self) -> Guide | None:
        return None


class JsonFormat(StrictModel):
    """Response format of any JSON object."""

    type: Literal["json_object"]

    def guide(self) -> Guide | None:
        return Guide(json_object=True)


class NamedSchema(StrictModel):
    """JSON schema with a name. It is enforced whether it is ``strict`` or not."""

    name: _Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None

    def guide(self) -> Guide | None:
        return Guide(json_schema=self.schema_)


class FlatSchemaFormat(NamedSchema):
    """Response format of a JSON schema, in the form of ``/v1/responses``."""

    type: Literal["json_schema"]


class SchemaFormat(StrictModel):
    """Response format of a JSON schema, in the form of chat completions."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def guide(self) -> Guide | None:
        return self.json_schema.guide()


_FORMAT_TAGS = {"text": "(text)", "json_object": "(json)", "json_schema": "(schema)"}


def _format_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _FORMAT_TAGS.get(kind) if isinstance(kind, str) else None


_FORMAT_ERROR = value_error("must have the type 'text', 'json_object' or 'json_schema'")
_BY_KIND = Discriminator(
    _format_tag,
    custom_error_type=_FORMAT_ERROR.type,
    custom_error_message=_FORMAT_ERROR.message(),
)
_Text = Annotated[TextFormat, Tag("(text)")]
_Json = Annotated[JsonFormat, Tag("(json)")]
ChatFormat = Annotated[_Text | _Json | Annotated[SchemaFormat, Tag("(schema)")], _BY_KIND]
ResponseFormat = Annotated[_Text | _Json | Annotated[FlatSchemaFormat, Tag("(schema)")], _BY_KIND]
