"""Forms that a text can be asked to have: any, JSON, or JSON that obeys a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from roseinfer.guided.guide import Guide
from roseinfer.server.shapes.bodies import Strict
from roseinfer.server.shapes.wrong_values import wrong

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
