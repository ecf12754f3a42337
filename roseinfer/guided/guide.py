"""Guides: the constraint on a completion's text, as users give it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from roseinfer.errors import BadArgument

MAX_GUIDE_CHARACTERS = 1 << 16
"""Most characters of a guide in all, which bounds the time to compile it."""


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the text of a completion, set by exactly one of these fields.

    It applies to the whole text, without the prompt: at each position, tokens that would break it
    are masked before the next one is chosen.
    """

    json_object: bool = False
    """True for any JSON object."""
    json_schema: str | Mapping[str, Any] | None = None
    """JSON schema of the text, as a mapping or as JSON."""
    regex: str | None = None
    """Regular expression that matches the whole text, in Rust's syntax, without look-around."""
    choice: tuple[str, ...] = ()
    """Possible texts."""
    grammar: str | None = None
    """Grammar of the text, in llguidance's dialect of Lark."""

    def __post_init__(self) -> None:
        used = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if len(used) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise BadArgument(
                f"a Guide has exactly one of {names}; this has "
                f"{' and '.join(used) or 'none of them'}"
            )
        if used == ["json_schema"]:
            object.__setattr__(self, "json_schema", _as_json(self.json_schema))
        elif used == ["choice"]:
            object.__setattr__(self, "choice", _as_texts(self.choice))
        elif used == ["json_object"]:
            if self.json_object is not True:
                raise BadArgument(f"Guide.json_object is {self.json_object!r}; it must be True")
        elif not isinstance(getattr(self, used[0]), str):
            raise BadArgument(f"Guide.{used[0]} is {getattr(self, used[0])!r}; it must be a text")
        size = sum(len(text) for text in (self.json_schema or "", self.regex or ""))
        size += sum(map(len, (*self.choice, self.grammar or "")))
        if size > MAX_GUIDE_CHARACTERS:
            raise BadArgument(
                f"the constraint has {size} characters; it may have at most {MAX_GUIDE_CHARACTERS}"
            )


def _as_json(schema: Any) -> str:
    """Return a schema as JSON, with its properties in order: texts have them in that order."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(value, Mapping):
            return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"Guide.json_schema is not JSON: {error}") from None
    raise BadArgument(f"Guide.json_schema is {value!r}; it must be a JSON object")


def _as_texts(texts: Any) -> tuple[str, ...]:
    is_list = isinstance(texts, (list, tuple)) and bool(texts)
    if is_list and all(isinstance(one, str) and one for one in texts):
        return tuple(texts)  # a list could be changed later
    raise BadArgument(
        f"Guide.choice is {texts!r}; it must be one or more texts in a list, none of them empty"
    )
