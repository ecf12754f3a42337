"""What every endpoint may be asked for. A field that is not here, or a value that is not served, is
refused: nothing is ignored that would have changed an answer.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from roseinfer.sampling_params import LONGEST_STOP, MOST_STOPS, SamplingParams
from roseinfer.server.refusals import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_core import ErrorDetails

    from roseinfer.guided.guide import Guide
    from roseinfer.server.prompts import Prompt, Prompts

# What is wrong with a body, in sentences that name the field and what it must be.


_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
"""What OpenAI calls errors that pydantic names so; the others are all an invalid value."""
_WRONG, _UNSERVED = "wrong", "unserved"
_MUST_BE = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "an array",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_long": "a string of at most {max_length} characters",
    "string_too_short": "a string that is not empty",
    "string_type": "a string",
    "too_long": "an array of at most {max_length} items",
    "too_short": "an array that is not empty",
}
"""What pydantic's errors ask for."""
_SOME = (_UNSERVED, "literal_error", "none_required")
"""Errors of values that may be right, and yet are not served."""


def wrong(what: str) -> PydanticCustomError:
    """Return an error of a value: what is wrong with it, as a sentence goes on from its name."""
    return PydanticCustomError(_WRONG, "{what}", {"what": what})


def unserved(what: str) -> PydanticCustomError:
    """Return the error of a value that others may serve. ``what`` says which are served here."""
    return PydanticCustomError(_UNSERVED, "{what}", {"what": what})


def refusal_of_body(error: ValidationError) -> Refused:
    """Return a refusal for the first thing that is wrong with a body. It repeats no value."""
    found = error.errors(include_url=False, include_input=False)
    first = min(found, key=lambda each: each["type"] == "missing")  # as of a part of another kind
    kind = first["type"]
    # Those in brackets say which of a field's kinds of values was tried.
    path = ".".join(str(part) for part in first["loc"] if not str(part).startswith("("))
    if kind == "json_invalid":
        return Refused(400, f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
    if kind == "missing":
        said = "is missing"
    elif kind == "extra_forbidden":
        said = "is not supported by this server"
    else:
        said = _said_of_value(first)
    code = _CODES.get(kind, "invalid_value")
    return Refused(400, f"{path or 'the body'} {said}", param=path or None, code=code)


def _said_of_value(error: ErrorDetails) -> str:
    kind, said = error["type"], error["msg"]
    if kind in _MUST_BE:
        limits = {name: _plain(value) for name, value in error.get("ctx", {}).items()}
        said = f"must be {_MUST_BE[kind].format(**limits)}"
        if kind == "list_type" and error["loc"][-1] == "(list)":
            said = "must be a string or an array"
    if kind in _SOME:
        said += ": other values are not supported by this server"
    return said


def _plain(value: Any) -> Any:
    """Return 2 for the limit 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Values that change nothing, which clients send for what is not served here. So they are taken.


def _require_nothing(value: Any) -> Any:
    if value:
        raise unserved("must be null or empty")
    return value


_NOTHING = AfterValidator(_require_nothing)
NoText = Annotated[str, _NOTHING, WithJsonSchema({"const": ""})] | None
NoList = Annotated[list[Any], _NOTHING, WithJsonSchema({"type": "array", "maxItems": 0})] | None
NoObject = (
    Annotated[dict[str, Any], _NOTHING, WithJsonSchema({"type": "object", "maxProperties": 0})]
    | None
)


def _require_false(value: bool) -> bool:
    if value:
        raise unserved("must be false")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_require_false), WithJsonSchema({"const": False})] | None
"""A ``Literal`` would take 0 for it."""


def _require_zeros(values: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, bool) or value != 0 for value in values.values()):
        raise unserved("must have no value but 0")
    return values


NoBias = (
    Annotated[
        dict[str, Any],
        AfterValidator(_require_zeros),
        WithJsonSchema({"type": "object", "additionalProperties": {"const": 0}}),
    ]
    | None
)


class NoReasoning(BaseModel):
    """As answers say it where nothing was reasoned, and as clients send it back."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
MOST_CHOICES = 128
_INT64 = 1 << 63
_NO_FIELDS = {"logprobs", "top_logprobs", "prompt_logprobs", "guide"}
"""What bodies have in other forms."""
BodyType = TypeVar("BodyType", bound="Asked")


def read_body(kind: type[BodyType], data: bytes) -> BodyType:
    """Return what was asked, or raise a refusal that names what is wrong."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise refusal_of_body(error) from None


def _kind(value: Any) -> str:
    return "(text)" if isinstance(value, str) else "(list)"


TEXT, LIST, TEXT_OR_LIST = Tag("(text)"), Tag("(list)"), Discriminator(_kind)
"""For fields that take one text or a list: an error is told of what was given, not of both."""
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[
    Annotated[_Stop, TEXT] | Annotated[list[_Stop], Field(max_length=MOST_STOPS), LIST],
    TEXT_OR_LIST,
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Part(Strict):
    """A part of a message, of which only texts are served."""

    text: str

    @field_validator("type", mode="wrap", check_fields=False)
    @classmethod
    def _only_texts(cls, kind: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(kind)
        except ValidationError as error:
            expected = error.errors()[0]["ctx"]["expected"]
            why = "images, audio and files are not supported by this server"
            raise wrong(f"must be {expected}: {why}") from None


class Said(Strict):
    """A message, by whoever said it."""

    role: str

    def as_told(self, content: str | Sequence[Part]) -> dict[str, str]:
        """Return it as chat templates know it: developers are a newer word for the system."""
        role = "system" if self.role == "developer" else self.role
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": role, "content": content}


class StreamOptions(Strict):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    """As vLLM has it: every chunk says the usage so far."""
    include_obfuscation: OnlyFalse = False


class Asked(Strict):
    """What every endpoint may be asked for. What is in the last group changes no answer."""

    guided_by: ClassVar[str] = ""
    """The field that says which form texts must have."""

    model: str
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.001, le=1000)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    ignore_eos: bool | None = False

    user: str | None = None
    metadata: dict[str, str] | None = None
    moderation: None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: NoObject = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse = None

    @field_validator("*", mode="before")
    @classmethod
    def _as_whole(cls, value: Any) -> Any:
        """Take 1.0 for the whole number that it is in JSON."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def params(
        self, max_new_tokens: int, choice: int, guide: Guide | None = None
    ) -> SamplingParams:
        """Return how the tokens of one of the choices are chosen."""
        given = self.model_dump(include=set(_SAMPLING - _NO_FIELDS), exclude_none=True)
        given = {"temperature": 1.0} | given
        if given.get("top_k") == -1:  # as vLLM turns it off
            given["top_k"] = 0
        if given.get("top_p") == 0:  # which OpenAI allows: only the likeliest token is left
            given["top_p"] = 1e-9
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        if self.seed is not None:
            given["seed"] = self.seed + choice
        return SamplingParams(
            **given | self.wanted_logprobs(choice) | {"max_new_tokens": max_new_tokens},
            guide=guide,
        )

    @property
    def most_tokens(self) -> int | None:
        """How many tokens were asked for; None for as many as there is room for."""
        raise NotImplementedError

    @property
    def prompts_only(self) -> bool:
        """True where nothing is wanted but what can be told of prompts."""
        return False

    @property
    def choices(self) -> int:
        """How many texts are wanted for each prompt."""
        return 1

    @property
    def num_texts(self) -> int:
        """How many are wanted in all."""
        return self.choices

    def wanted_logprobs(self, choice: int) -> dict[str, Any]:  # noqa: ARG002
        """Return what ``SamplingParams`` are told of them."""
        return {}

    def guide(self) -> Guide | None:
        """Return the form that texts must have."""
        return None

    async def prompts(self, prompts: Prompts) -> list[Prompt]:
        raise NotImplementedError


def only_with(name: str, value: dict[str, Any], needed: str) -> dict[str, Any]:
    """Return a schema by which a field has such a value only where another one is true."""
    return {
        "if": {"properties": {name: value}, "required": [name]},
        "then": {"properties": {needed: {"const": True}}, "required": [needed]},
    }


_ANY_OPTION = [
    {"properties": {name: {"const": True}}, "required": [name]}
    for name in ("include_usage", "continuous_usage_stats")
]
OF_STREAMS = only_with("stream_options", {"type": "object", "anyOf": _ANY_OPTION}, "stream")


class AskedForChoices(Asked):
    """What completions and chat completions may be asked for besides."""

    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    stop: Stops | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: NoBias = None

    @field_validator("stream_options")
    @classmethod
    def _only_for_streams(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        asked = value is not None and any(value.model_dump().values())
        if asked and not info.data.get("stream"):
            raise wrong("is for streams alone: it needs stream to be true")
        return value

    @property
    def choices(self) -> int:
        return self.n or 1
