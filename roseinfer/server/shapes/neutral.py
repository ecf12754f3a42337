"""Values that change nothing, which clients send for what is not served here. So they are taken."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

NoText = Literal[""] | None
NoList = Annotated[list[Any], Field(max_length=0)] | None
NoObject = Annotated[dict[str, Any], Field(max_length=0)] | None


def _require_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("not_false", "Input should be false")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_require_false), WithJsonSchema({"const": False})] | None
"""A ``Literal`` would take 0 for it."""


def _require_zeros(values: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, bool) or value != 0 for value in values.values()):
        raise PydanticCustomError("not_zero", "All its values should be 0")
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
