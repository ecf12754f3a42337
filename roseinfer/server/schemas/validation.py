"""Validation of request bodies.

An unknown field, or a value that is not supported, is refused: nothing is ignored that would change
a response.
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

from roseinfer.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from roseinfer.server.api_errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_core import ErrorDetails

    from roseinfer.guided.guide import Guide
    from roseinfer.server.prompts import Prompt, PromptEncoder

# Error messages, which name the field and its valid values.


_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
"""OpenAI's error codes by pydantic's error types; all other types are ``invalid_value``."""
_WRONG, _UNSUPPORTED = "wrong", "unserved"
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
"""Valid values by pydantic's error types."""
_UNSUPPORTED_TYPES = (_UNSUPPORTED, "literal_error", "none_required")
"""Error types of values that may be valid elsewhere, but are not supported by this server."""


def value_error(message: str) -> PydanticCustomError:
    """Return an error of a value; the message is the field's name and ``message``."""
    return PydanticCustomError(_WRONG, "{what}", {"what": message})


def unsupported_value_error(message: str) -> PydanticCustomError:
    """Return an error of an unsupported value; ``message`` names the supported ones."""
    return PydanticCustomError(_UNSUPPORTED, "{what}", {"what": message})


def to_body_error(error: ValidationError) -> ApiError:
    """Return the API error for the first error of a body. The message repeats no value."""
    errors = error.errors(include_url=False, include_input=False)
    # Missing fields come last: they may be due to a value of another type.
    first = min(errors, key=lambda each: each["type"] == "missing")
    error_type = first["type"]
    # Names in brackets are tags: the type of value that was tried.
    path = ".".join(str(part) for part in first["loc"] if not str(part).startswith("("))
    if error_type == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json"
        )
    if error_type == "missing":
        message = "is missing"
    elif error_type == "extra_forbidden":
        message = "is not supported by this server"
    else:
        message = _value_error_message(first)
    code = _CODES.get(error_type, "invalid_value")
    return ApiError(400, f"{path or 'the body'} {message}", param=path or None, code=code)


def _value_error_message(error: ErrorDetails) -> str:
    error_type, message = error["type"], error["msg"]
    if error_type in _MUST_BE:
        limits = {name: _plain(value) for name, value in error.get("ctx", {}).items()}
        message = f"must be {_MUST_BE[error_type].format(**limits)}"
        if error_type == "list_type" and error["loc"][-1] == "(list)":
            message = "must be a string or an array"
    if error_type in _UNSUPPORTED_TYPES:
        message += ": other values are not supported by this server"
    return message


def _plain(value: Any) -> Any:
    """Return a float without a fraction as an int, so that messages have 2 instead of 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Neutral values of unsupported fields. They are accepted since clients send them.


def _require_empty(value: Any) -> Any:
    if value:
        raise unsupported_value_error("must be null or empty")
    return value


_EMPTY = AfterValidator(_require_empty)
EmptyText = Annotated[str, _EMPTY, WithJsonSchema({"const": ""})] | None
EmptyList = Annotated[list[Any], _EMPTY, WithJsonSchema({"type": "array", "maxItems": 0})] | None
EmptyObject = (
    Annotated[dict[str, Any], _EMPTY, WithJsonSchema({"type": "object", "maxProperties": 0})] | None
)


def _require_false(value: bool) -> bool:
    if value:
        raise unsupported_value_error("must be false")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_require_false), WithJsonSchema({"const": False})] | None
"""False or None. A ``Literal`` would accept 0 as well."""


def _require_zeros(values: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, bool) or value != 0 for value in values.values()):
        raise unsupported_value_error("must have only values of 0")
    return values


ZeroBias = (
    Annotated[
        dict[str, Any],
        AfterValidator(_require_zeros),
        WithJsonSchema({"type": "object", "additionalProperties": {"const": 0}}),
    ]
    | None
)


class NoReasoning(BaseModel):
    """Reasoning options without reasoning, as in response objects, which clients send back."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
MAX_CHOICES = 128
_INT64 = 1 << 63
_CONVERTED_FIELDS = {"logprobs", "top_logprobs", "prompt_logprobs", "guide"}
"""Fields of ``SamplingParams`` that bodies have in other forms."""
BodyType = TypeVar("BodyType", bound="RequestBody")


def read_body(kind: type[BodyType], data: bytes) -> BodyType:
    """Parse and validate a body; raise an error that names the invalid field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise to_body_error(error) from None


def _text_or_list_tag(value: Any) -> str:
    return "(text)" if isinstance(value, str) else "(list)"


TEXT, LIST, TEXT_OR_LIST = Tag("(text)"), Tag("(list)"), Discriminator(_text_or_list_tag)
"""Tags of fields that accept a text or a list: errors are then about the type that was sent."""
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    Annotated[_Stop, TEXT] | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS), LIST],
    TEXT_OR_LIST,
]


class StrictModel(BaseModel):
    """Base of schemas that refuse unknown fields, type coercion, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ContentPart(StrictModel):
    """Part of a message; only text is supported."""

    text: str

    @field_validator("type", mode="wrap", check_fields=False)
    @classmethod
    def _check_part_type(cls, kind: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(kind)
        except ValidationError as error:
            expected = error.errors()[0]["ctx"]["expected"]
            message = "images, audio and files are not supported by this server"
            raise value_error(f"must be {expected}: {message}") from None


class ChatMessage(StrictModel):
    """Message of a chat, of any role."""

    role: str

    def to_template_message(self, content: str | Sequence[ContentPart]) -> dict[str, str]:
        """Return the message in the format of chat templates, where ``developer`` is ``system``."""
        role = "system" if self.role == "developer" else self.role
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": role, "content": content}


class StreamOptions(StrictModel):
    """Options of a stream of completions."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    """Usage so far in every chunk, as in vLLM."""
    include_obfuscation: OnlyFalse = False


class RequestBody(StrictModel):
    """Fields of all request bodies. Those of the last group change no response."""

    guide_field: ClassVar[str] = ""
    """Name of the field with the guide's format, for messages."""

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
    prompt_cache_options: EmptyObject = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse = None

    @field_validator("*", mode="before")
    @classmethod
    def _whole_float_to_int(cls, value: Any) -> Any:
        """Convert 1.0 to 1: JSON has one type of numbers."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def params(
        self, max_new_tokens: int, choice: int, guide: Guide | None = None
    ) -> SamplingParams:
        """Return the sampling parameters of a choice."""
        values = self.model_dump(include=set(_SAMPLING - _CONVERTED_FIELDS), exclude_none=True)
        values = {"temperature": 1.0} | values
        if values.get("top_k") == -1:  # as vLLM turns it off
            values["top_k"] = 0
        if values.get("top_p") == 0:  # OpenAI allows it: only the argmax is left
            values["top_p"] = 1e-9
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        if self.seed is not None:
            values["seed"] = self.seed + choice
        return SamplingParams(
            **values | self.logprob_params(choice) | {"max_new_tokens": max_new_tokens},
            guide=guide,
        )

    @property
    def requested_max_tokens(self) -> int | None:
        """Requested limit of generated tokens; None for as many as the context has room for."""
        raise NotImplementedError

    @property
    def prefill_only(self) -> bool:
        """True if only the prompt's logprobs or text are requested, and no generated tokens."""
        return False

    @property
    def num_choices(self) -> int:
        """Number of choices per prompt."""
        return 1

    @property
    def num_completions(self) -> int:
        """Number of choices of all prompts."""
        return self.num_choices

    def logprob_params(self, choice: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the fields of ``SamplingParams`` about logprobs."""
        return {}

    def guide(self) -> Guide | None:
        """Return the guide of all completions; None without one."""
        return None

    async def encode_prompts(self, prompts: PromptEncoder) -> list[Prompt]:
        raise NotImplementedError


def requires_field(name: str, value: dict[str, Any], needed: str) -> dict[str, Any]:
    """Return a JSON schema rule: if ``name`` has a ``value``, then ``needed`` must be true."""
    return {
        "if": {"properties": {name: value}, "required": [name]},
        "then": {"properties": {needed: {"const": True}}, "required": [needed]},
    }


_ANY_OPTION = [
    {"properties": {name: {"const": True}}, "required": [name]}
    for name in ("include_usage", "continuous_usage_stats")
]
STREAM_OPTIONS_RULE = requires_field(
    "stream_options", {"type": "object", "anyOf": _ANY_OPTION}, "stream"
)


class ChoicesRequestBody(RequestBody):
    """Fields that completions and chat completions have in common."""

    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: ZeroBias = None

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        has_options = value is not None and any(value.model_dump().values())
        if has_options and not info.data.get("stream"):
            raise value_error("needs stream to be true")
        return value

    @property
    def num_choices(self) -> int:
        return self.n or 1
