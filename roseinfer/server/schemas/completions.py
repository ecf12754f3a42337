"""``/v1/completions``: texts that continue prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from roseinfer.server.schemas.choices import ChoicesAnswer
from roseinfer.server.schemas.validation import (
    MOST_CHOICES,
    OF_STREAMS,
    AskedForChoices,
    NoText,
    only_with,
    wrong,
)
from roseinfer.server.streaming import Json, encode_any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine_client.protocol import Likeliest
    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.prompts import Prompt, Prompts
    from roseinfer.server.schemas.choices import Lists, TokenTexts

# Where the tokens of a text begin in it.


class TextOffsets:
    """The offsets of one choice's tokens, in characters of its text with its prompt before it.

    The text of a token stands at its offset. A token that is a part of a character, or adds
    nothing, begins behind the characters that the tokens before it completed.
    """

    def __init__(self, token_texts: TokenTexts, begin: int) -> None:
        """``begin`` is how many characters are echoed before the text."""
        self._text = _Growing(token_texts, begin)

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return where tokens begin. They must come in their order."""
        return [self._text.add(token) for token in tokens]


class PromptOffsets:
    """The same for the tokens of a prompt that is echoed."""

    def __init__(self, token_texts: TokenTexts, prompt: str) -> None:
        self._token_texts = token_texts
        self._prompt = prompt
        self._text = _Growing(token_texts, 0)

    def of(self, tokens: Sequence[int]) -> list[int]:
        return [self._add(token) for token in tokens]

    def _add(self, token: int) -> int:
        special = self._token_texts.special(token)
        # One that a tokenizer adds by itself, as at the beginning, is not in the text.
        shown = special if self._prompt.startswith(special, self._text.end) else ""
        # A tokenizer may change what it reads, so that the text of its tokens is longer.
        return min(self._text.add(token, shown), len(self._prompt))


class _Growing:
    """A text of which every token is told where it begins."""

    def __init__(self, token_texts: TokenTexts, begin: int) -> None:
        self._token_texts = token_texts
        self._detokenizer = token_texts.detokenizer()
        self.end = begin

    def add(self, token: int, shown: str = "") -> int:
        """Take one more token, and return where it begins. ``shown`` is added to its text."""
        begin, own = self.end, self._token_texts[token][0]
        added = self._detokenizer.add(token) + shown
        self.end += len(added)
        # Before its own text may stand what is left of a character that others began.
        return self.end - len(own) if added.endswith(own) else begin


_DEFAULT_TOKENS = 16
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_ECHO_ALONE = only_with("max_tokens", {"const": 0}, "echo")
_MANY = {"type": "array", "minItems": 1, "maxItems": MOST_CHOICES}


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return value != ""
    return isinstance(value, list) and value != [] and all(map(_is_whole, value))


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _as_prompts(value: Any) -> list[str | list[int]]:
    """Return a list of prompts, of whatever form they came in."""
    found = [value] if _is_prompt(value) else value
    if found in ("", []):
        raise wrong("must not be empty")
    if not isinstance(found, list):
        raise wrong("must be a string, token ids, or an array of these")
    if not all(map(_is_prompt, found)):
        raise wrong("must have strings or token ids in its array, none of them empty")
    if len(found) > MOST_CHOICES:
        raise wrong(f"must have at most {MOST_CHOICES} prompts")
    return [each if isinstance(each, str) else [*map(int, each)] for each in found]


class CompletionBody(AskedForChoices):
    model_config = ConfigDict(json_schema_extra={"allOf": [OF_STREAMS, _ECHO_ALONE]})

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_as_prompts),
        WithJsonSchema({"anyOf": [_TEXT, _MANY | {"items": _TEXT}, _IDS, _MANY | {"items": _IDS}]}),
    ]
    echo: bool | None = False
    max_tokens: int | None = Field(_DEFAULT_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=1)
    suffix: NoText = None

    @field_validator("max_tokens")
    @classmethod
    def _some_unless_echoed(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise wrong("must be at least 1, or 0 where echo is true")
        return value

    @property
    def most_tokens(self) -> int | None:
        if self.prompts_only:
            return 1  # there is no prompt without a token behind it
        return self.max_tokens or _DEFAULT_TOKENS

    @property
    def prompts_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def num_texts(self) -> int:
        return len(self.prompt) * self.choices

    def wanted_logprobs(self, choice: int) -> dict[str, Any]:
        if self.logprobs is None:
            return {}
        wanted: dict[str, Any] = {"logprobs": True}
        if self.logprobs:
            wanted["top_logprobs"] = self.logprobs
        if self.echo and choice == 0:  # all choices for a prompt have these from the first
            wanted["prompt_logprobs"] = True
        return wanted

    async def prompts(self, prompts: Prompts) -> list[Prompt]:
        return await prompts.of(self.prompt, "prompt")

    async def echoed(self, prompts: Prompts) -> list[str]:
        """Return what stands before the texts for each prompt."""
        if not self.echo:
            return [""] * len(self.prompt)
        decoded = iter(await prompts.texts_of([p for p in self.prompt if isinstance(p, list)]))
        return [each if isinstance(each, str) else next(decoded) for each in self.prompt]


class Completion(ChoicesAnswer):
    PREFIX = "cmpl"
    WHOLE = CHUNK = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        generation: Generation,
        token_texts: TokenTexts,
        echoed: list[str],
    ) -> None:
        """``echoed`` are the prompts, if they are echoed, or else empty texts."""
        super().__init__(body, generation, token_texts)
        self._choices = body.choices
        self._wants_logprobs = body.logprobs is not None
        self._likeliest = body.logprobs or 0
        self._echoed = echoed
        self._offsets = [
            TextOffsets(token_texts, len(text)) for text in echoed for _ in range(body.choices)
        ]
        self._begun: set[int] = set()
        """Choices of which something was told."""
        self._texts: dict[int, bytes] = {}
        """The prompts as JSON, without the quotes at their ends, by their numbers."""
        self._columns: dict[int, dict[str, bytes]] = {}
        """The lists of their log-probabilities."""

    async def part(self, piece: Piece) -> dict[str, Any] | None:
        echoes = self._echoed[self._prompt(piece)] and piece.choice not in self._begun
        says_something = piece.text or self._wants_logprobs or echoes
        return await self.choice(piece) if says_something or piece.finish_reason else None

    async def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "text": self._text(piece),
            "logprobs": await self._logprobs(piece) if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _prompt(self, piece: Piece) -> int:
        return piece.choice // self._choices

    def _text(self, piece: Piece) -> str | Json:
        prompt = self._prompt(piece)
        if piece.choice in self._begun or not self._echoed[prompt]:
            return piece.text
        self._begun.add(piece.choice)
        if prompt not in self._texts:
            self._texts[prompt] = encode_any(self._echoed[prompt])[:-1].encode()
        return Json((self._texts[prompt], encode_any(piece.text)[1:].encode()))

    async def _logprobs(self, piece: Piece) -> dict[str, Any]:
        before = await self._of_prompt(piece) if piece.echoed else None
        offsets = self._offsets[piece.choice]

        def told(at: slice) -> Lists:
            tokens, tops = piece.tokens[at], piece.likeliest[at] if self._likeliest else None
            return self.token_texts.of_completion(
                tokens, piece.logprobs[at], tops, offsets.of(tokens)
            )

        found = await self.lists(len(piece.tokens), 1 + self._likeliest, told, before)
        return {name: found.get(name) for name in _COLUMNS}

    async def _of_prompt(self, piece: Piece) -> dict[str, bytes]:
        """Return the lists of a prompt, which are the same for all its choices."""
        prompt = self._prompt(piece)
        if prompt not in self._columns:
            offsets = PromptOffsets(self.token_texts, self._echoed[prompt])

            def told(at: slice) -> Lists:
                tokens = [token for token, _ in piece.echoed[at]]
                logprobs = [logprob for _, logprob in piece.echoed[at]]
                tops: list[Likeliest] | None = [[]] * len(tokens) if self._likeliest else None
                return self.token_texts.of_completion(tokens, logprobs, tops, offsets.of(tokens))

            self._columns[prompt] = await self.columns(len(piece.echoed), 1, told)
        return self._columns[prompt]
