"""Schema of ``/v1/completions``: completions of prompts, and echoed prompts."""

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

from roseinfer.server.schemas.choices import ChoicesResponse
from roseinfer.server.schemas.validation import (
    MAX_CHOICES,
    STREAM_OPTIONS_RULE,
    ChoicesRequestBody,
    EmptyText,
    requires_field,
    value_error,
)
from roseinfer.server.streaming import EncodedJson, encode_any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine_client.protocol import TopLogprobs
    from roseinfer.server.generation import ChoiceDelta, Generation
    from roseinfer.server.prompts import Prompt, PromptEncoder
    from roseinfer.server.schemas.choices import Lists, TokenTexts

# Text offsets of tokens.


class TextOffsets:
    """Offsets of one choice's tokens, in characters of its text, including an echoed prompt.

    The text of a token begins at its offset. A token that is a part of a character, or adds no
    text, begins after the characters that previous tokens completed.
    """

    def __init__(self, token_texts: TokenTexts, begin: int) -> None:
        """Start at ``begin``, the number of characters echoed before the completion."""
        self._text = _IncrementalText(token_texts, begin)

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens. Calls must pass all tokens in their order."""
        return [self._text.add(token) for token in tokens]


class PromptOffsets:
    """Offsets of the tokens of an echoed prompt, in characters of its text."""

    def __init__(self, token_texts: TokenTexts, prompt: str) -> None:
        self._token_texts = token_texts
        self._prompt = prompt
        self._text = _IncrementalText(token_texts, 0)

    def of(self, tokens: Sequence[int]) -> list[int]:
        return [self._add(token) for token in tokens]

    def _add(self, token: int) -> int:
        special = self._token_texts.special(token)
        # A special token that the tokenizer added itself, such as BOS, is not in the text.
        shown = special if self._prompt.startswith(special, self._text.end) else ""
        # A tokenizer may normalise the text, so that the text of its tokens is longer.
        return min(self._text.add(token, shown), len(self._prompt))


class _IncrementalText:
    """Length of a growing text, and the offset of each token that is added."""

    def __init__(self, token_texts: TokenTexts, begin: int) -> None:
        self._token_texts = token_texts
        self._detokenizer = token_texts.detokenizer()
        self.end = begin

    def add(self, token: int, text: str = "") -> int:
        """Add a token, and return its offset. ``text`` is appended to its text."""
        begin, token_text = self.end, self._token_texts[token][0]
        added = self._detokenizer.add(token) + text
        self.end += len(added)
        # The added text may begin with the rest of a character that earlier tokens began.
        return self.end - len(token_text) if added.endswith(token_text) else begin


_DEFAULT_TOKENS = 16
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_ECHO_ONLY_RULE = requires_field("max_tokens", {"const": 0}, "echo")
_MANY_PROMPTS = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES}


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return value != ""
    return isinstance(value, list) and value != [] and all(map(_is_whole, value))


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _as_prompts(value: Any) -> list[str | list[int]]:
    """Convert a prompt, or a list of prompts, as text or token ids, to a list of prompts."""
    prompts = [value] if _is_prompt(value) else value
    if prompts in ("", []):
        raise value_error("must not be empty")
    if not isinstance(prompts, list):
        raise value_error("must be a string, token ids, or an array of these")
    if not all(map(_is_prompt, prompts)):
        raise value_error(
            "must be an array of strings, or of arrays of token ids, none of them empty"
        )
    if len(prompts) > MAX_CHOICES:
        raise value_error(f"must have at most {MAX_CHOICES} prompts")
    return [each if isinstance(each, str) else [*map(int, each)] for each in prompts]


class CompletionBody(ChoicesRequestBody):
    """Request body of a completion."""

    model_config = ConfigDict(json_schema_extra={"allOf": [STREAM_OPTIONS_RULE, _ECHO_ONLY_RULE]})

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_as_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    _TEXT,
                    _MANY_PROMPTS | {"items": _TEXT},
                    _IDS,
                    _MANY_PROMPTS | {"items": _IDS},
                ]
            }
        ),
    ]
    echo: bool | None = False
    max_tokens: int | None = Field(_DEFAULT_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=1)
    suffix: EmptyText = None

    @field_validator("max_tokens")
    @classmethod
    def _check_zero_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise value_error("must be at least 1, or 0 if echo is true")
        return value

    @property
    def requested_max_tokens(self) -> int | None:
        if self.prefill_only:
            return 1  # a prefill always generates one token
        return self.max_tokens or _DEFAULT_TOKENS

    @property
    def prefill_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def num_completions(self) -> int:
        return len(self.prompt) * self.num_choices

    def logprob_params(self, choice: int) -> dict[str, Any]:
        if self.logprobs is None:
            return {}
        params: dict[str, Any] = {"logprobs": True}
        if self.logprobs:
            params["top_logprobs"] = self.logprobs
        if self.echo and choice == 0:  # all choices for a prompt use those of the first
            params["prompt_logprobs"] = True
        return params

    async def encode_prompts(self, prompts: PromptEncoder) -> list[Prompt]:
        return await prompts.encode(self.prompt, "prompt")

    async def echoed_prompts(self, prompts: PromptEncoder) -> list[str]:
        """Return the texts of the prompts to echo; empty texts if ``echo`` is not set."""
        if not self.echo:
            return [""] * len(self.prompt)
        decoded = iter(await prompts.decode([p for p in self.prompt if isinstance(p, list)]))
        return [each if isinstance(each, str) else next(decoded) for each in self.prompt]


class Completion(ChoicesResponse):
    """Response of a completion."""

    PREFIX = "cmpl"
    OBJECT = CHUNK_OBJECT = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        generation: Generation,
        token_texts: TokenTexts,
        echoed: list[str],
    ) -> None:
        """Prepare a response; ``echoed`` has the text to echo for each prompt, or empty texts."""
        super().__init__(body, generation, token_texts)
        self._choices = body.num_choices
        self._wants_logprobs = body.logprobs is not None
        self._num_top_logprobs = body.logprobs or 0
        self._echoed = echoed
        self._offsets = [
            TextOffsets(token_texts, len(text)) for text in echoed for _ in range(body.num_choices)
        ]
        self._echoed_choices: set[int] = set()
        """Choices whose prompt was echoed."""
        self._texts: dict[int, bytes] = {}
        """Echoed prompts as JSON, without the final quote, by prompt number."""
        self._columns: dict[int, dict[str, bytes]] = {}
        """Encoded lists of the prompts' logprobs, by prompt number."""

    async def part(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        echoes = self._echoed[self._prompt(delta)] and delta.choice not in self._echoed_choices
        has_output = delta.text or self._wants_logprobs or echoes
        return await self.choice(delta) if has_output or delta.finish_reason else None

    async def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "text": self._text(delta),
            "logprobs": await self._logprobs(delta) if self._wants_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _prompt(self, delta: ChoiceDelta) -> int:
        return delta.choice // self._choices

    def _text(self, delta: ChoiceDelta) -> str | EncodedJson:
        prompt = self._prompt(delta)
        if delta.choice in self._echoed_choices or not self._echoed[prompt]:
            return delta.text
        self._echoed_choices.add(delta.choice)
        if prompt not in self._texts:
            self._texts[prompt] = encode_any(self._echoed[prompt])[:-1].encode()
        return EncodedJson((self._texts[prompt], encode_any(delta.text)[1:].encode()))

    async def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        before = await self._prompt_columns(delta) if delta.echoed_tokens else None
        offsets = self._offsets[delta.choice]

        def lists_of(at: slice) -> Lists:
            tokens, tops = (
                delta.tokens[at],
                delta.top_logprobs[at] if self._num_top_logprobs else None,
            )
            return self.token_texts.completion_logprobs(
                tokens, delta.logprobs[at], tops, offsets.of(tokens)
            )

        lists = await self.lists(len(delta.tokens), 1 + self._num_top_logprobs, lists_of, before)
        return {name: lists.get(name) for name in _COLUMNS}

    async def _prompt_columns(self, delta: ChoiceDelta) -> dict[str, bytes]:
        """Return the encoded logprobs of a prompt, which all its choices share."""
        prompt = self._prompt(delta)
        if prompt not in self._columns:
            offsets = PromptOffsets(self.token_texts, self._echoed[prompt])

            def lists_of(at: slice) -> Lists:
                tokens = [token for token, _ in delta.echoed_tokens[at]]
                logprobs = [logprob for _, logprob in delta.echoed_tokens[at]]
                tops: list[TopLogprobs] | None = (
                    [[]] * len(tokens) if self._num_top_logprobs else None
                )
                return self.token_texts.completion_logprobs(
                    tokens, logprobs, tops, offsets.of(tokens)
                )

            self._columns[prompt] = await self.columns(len(delta.echoed_tokens), 1, lists_of)
        return self._columns[prompt]
