"""Values that change nothing, which clients send for what is not served here. So they are taken."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema

from roseinfer.server.shapes.wrong_values import unserved


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
