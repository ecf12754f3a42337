"""What answers of completions and of chat completions have in common."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Discriminator, Field, StringConstraints, Tag

from roseinfer.guided.guide import Guide
from roseinfer.server.refusals import refusal_of
from roseinfer.server.schemas.validation import Strict, wrong
from roseinfer.server.streaming import (
    AT_ONCE,
    BYTES_AT_ONCE,
    DONE,
    Json,
    Turns,
    encode_any,
    encode_finite,
    event,
    items,
    list_of,
    parts_of,
)
from roseinfer.text.decoder_chain import BYTE_TOKEN
from roseinfer.text.detokenizer import BYTE_OF

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from roseinfer.engine_client.protocol import Likeliest
    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.schemas.validation import AskedForChoices

# What single tokens are as text, and their log-probabilities as OpenAI writes them.


class TokenTexts:
    """The text and the bytes of each token, which are made when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        # It imports transformers, which the process that serves HTTP does not wait for.
        from roseinfer.text.request_text import detokenizers

        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._special: dict[int, str] = {}
        self.detokenizer = detokenizers(tokenizer)
        """Makes what decodes one text token by token, as the engine does."""

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def special(self, token: int) -> str:
        """Return what a token is written as that only prompts show; nothing for any other."""
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

    def of_chat(
        self, tokens: Sequence[int], logprobs: Sequence[float], likeliest: Sequence[Likeliest]
    ) -> dict[str, list[Any]]:
        """Return the log-probabilities of tokens as a chat completion has them."""
        tops = likeliest or [[]] * len(tokens)
        content = [
            self._told(token, logprob)
            | {"top_logprobs": [self._told(other, own) for other, own in top]}
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]
        return {"content": content}

    def of_completion(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        likeliest: Sequence[Likeliest] | None,
        offsets: list[int],
    ) -> dict[str, list[Any]]:
        """Return them as a completion has them. ``offsets`` are where the tokens begin.

        ``likeliest`` is None if log-probabilities of other tokens were not asked for.
        """
        found: dict[str, list[Any]] = {
            "tokens": [self[token][0] for token in tokens],
            "token_logprobs": [*logprobs],
            "text_offset": offsets,
        }
        if likeliest is not None:
            found["top_logprobs"] = [
                None
                if logprob is None
                else {self[other][0]: own for other, own in (*top, (token, logprob))}
                for token, logprob, top in zip(tokens, logprobs, likeliest, strict=True)
            ]
        return found

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self[token]
        return {"token": text, "logprob": logprob, "bytes": data}


def _bytes_of(written: str) -> bytes:
    """Return the bytes of a token that is a part of a character; none if nobody knows them."""
    if found := BYTE_TOKEN.fullmatch(written):
        return bytes([int(found[1], 16)])
    known = all(character in BYTE_OF for character in written)
    return bytes(BYTE_OF[character] for character in written) if known else b""


if TYPE_CHECKING:
    Lists = dict[str, list[Any]]


class ChoicesAnswer(ABC):
    """An answer with a list of choices, whole or in chunks."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(
        self, body: AskedForChoices, generation: Generation, token_texts: TokenTexts
    ) -> None:
        self.generation = generation
        self.token_texts = token_texts
        self._asked = body.stream_options
        self._turns = Turns()
        self._encode = encode_any
        self._head = {
            "id": f"{self.PREFIX}-{uuid4().hex}",
            "object": self.WHOLE,
            "created": int(time.time()),
            "model": body.model,
        }

    @abstractmethod
    async def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a choice of an answer that comes at once."""

    @abstractmethod
    async def part(self, piece: Piece) -> dict[str, Any] | None:
        """Return a choice of a chunk; None for a piece that needs none, since its text is not
        certain yet."""

    async def whole(self) -> list[bytes]:
        self._encode = encode_finite
        choices = [
            Json([*parts_of(await self.choice(piece), self._encode)])
            for piece in await self.generation.whole()
        ]
        whole = self._head | {"choices": choices, "usage": self._usage()}
        return [*parts_of(whole, self._encode)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        self._head["object"] = self.CHUNK
        asked = self._asked
        continuous = asked is not None and asked.continuous_usage_stats
        counted = asked is not None and asked.include_usage
        async with aclosing(self.generation.bursts()) as bursts:
            async for burst in bursts:
                so_far = self._usage() if continuous else None
                usage = {"usage": so_far} if continuous or counted else {}
                chunks = bytearray()
                for piece in burst:
                    if (part := await self.part(piece)) is not None:
                        chunks += event(self._head | {"choices": [part]} | usage)
                    if len(chunks) >= BYTES_AT_ONCE:
                        yield bytes(chunks)
                        await asyncio.sleep(0)
                        chunks.clear()
                if self.generation.over:
                    if counted:
                        chunks += event(self._head | {"choices": [], "usage": self._usage()})
                    chunks += DONE
                if chunks:
                    yield bytes(chunks)

    def failed(self, error: Exception) -> bytes:
        return event(refusal_of(error).body) + DONE

    async def lists(
        self,
        count: int,
        each: int,
        told: Callable[[slice], Lists],
        before: Mapping[str, bytes] | None = None,
    ) -> dict[str, Any]:
        """Return lists that are told of slices of ``count`` tokens, each of so many numbers.

        They are encoded if they are long, or if encoded items stand ``before`` theirs.
        """
        if before is None and count * each <= AT_ONCE:
            await self._turns.after(count * each)
            return dict(told(slice(0, count)))
        columns = await self.columns(count, each, told)
        return {name: list_of((before or {}).get(name), own) for name, own in columns.items()}

    async def columns(
        self, count: int, each: int, told: Callable[[slice], Lists]
    ) -> dict[str, bytes]:
        """Return the items of such lists as JSON. Others have turns between the slices."""
        found: dict[str, list[bytes]] = {}
        size = max(1, AT_ONCE // each)
        for begin in range(0, max(1, count), size):
            for name, values in told(slice(begin, begin + size)).items():
                found.setdefault(name, []).append(items(values, self._encode))
            await self._turns.after(min(size, count - begin) * each)
        return {name: b",".join(filter(None, slices)) for name, slices in found.items()}

    def _usage(self) -> dict[str, Any]:
        used = self.generation.usage
        return {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }


# Forms that a text can be asked to have: any, JSON, or JSON that obeys a schema.


_Name = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class TextFormat(Strict):
    type: Literal["text"]

    def guide(self) -> Guide | None:
        return None


class JsonFormat(Strict):
    type: Literal["json_object"]

    def guide(self) -> Guide | None:
        return Guide(json_object=True)


class NamedSchema(Strict):
    """A schema. Texts are held to it whether it is ``strict`` or not."""

    name: _Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None

    def guide(self) -> Guide | None:
        return Guide(json_schema=self.schema_)


class FlatSchemaFormat(NamedSchema):
    """As responses have it."""

    type: Literal["json_schema"]


class SchemaFormat(Strict):
    """As chats have it."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def guide(self) -> Guide | None:
        return self.json_schema.guide()


_KINDS = {"text": "(text)", "json_object": "(json)", "json_schema": "(schema)"}


def _kind(value: Any) -> str | None:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _KINDS.get(found) if isinstance(found, str) else None


_WRONG = wrong("must be of the type 'text', 'json_object' or 'json_schema'")
_BY_KIND = Discriminator(
    _kind,
    custom_error_type=_WRONG.type,
    custom_error_message=_WRONG.message(),
)
_Text = Annotated[TextFormat, Tag("(text)")]
_Json = Annotated[JsonFormat, Tag("(json)")]
ChatFormat = Annotated[_Text | _Json | Annotated[SchemaFormat, Tag("(schema)")], _BY_KIND]
ResponseFormat = Annotated[_Text | _Json | Annotated[FlatSchemaFormat, Tag("(schema)")], _BY_KIND]
