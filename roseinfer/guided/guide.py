"""What form a text must have, as users ask for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from roseinfer.errors import BadArgument

LONGEST_GUIDE = 1 << 16
"""Characters that a guide may have in all, which bounds how long it takes to prepare."""


@dataclass(frozen=True, slots=True)
class Guide:
    """The form of a text, which is one of these. It holds for the whole text, without its prompt.

    The tokens that the text could not go on with are ruled out before the next one is chosen.
    """

    json_object: bool = False
    """Any JSON object."""
    json_schema: str | Mapping[str, Any] | None = None
    """JSON that obeys this schema, which may be given as JSON itself."""
    regex: str | None = None
    """A text that this regular expression, of Rust's kind and without look-around, matches."""
    choice: tuple[str, ...] = ()
    """One of these texts."""
    grammar: str | None = None
    """A text of this grammar, in llguidance's dialect of Lark."""

    def __post_init__(self) -> None:
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if len(given) != 1:
            named = ", ".join(each.name for each in fields(self))
            raise BadArgument(
                f"a Guide is one of {named}, and this has {' and '.join(given) or 'none of them'}"
            )
        if given == ["json_schema"]:
            object.__setattr__(self, "json_schema", _as_json(self.json_schema))
        elif given == ["choice"]:
            object.__setattr__(self, "choice", _as_texts(self.choice))
        elif given == ["json_object"]:
            if self.json_object is not True:
                raise BadArgument(f"Guide.json_object is {self.json_object!r}; it must be True")
        elif not isinstance(getattr(self, given[0]), str):
            raise BadArgument(f"Guide.{given[0]} is {getattr(self, given[0])!r}; it must be a text")
        size = sum(len(text) for text in (self.json_schema or "", self.regex or ""))
        size += sum(map(len, (*self.choice, self.grammar or "")))
        if size > LONGEST_GUIDE:
            raise BadArgument(
                f"this form of text has {size} characters; at most {LONGEST_GUIDE} can be followed"
            )


def _as_json(schema: Any) -> str:
    """Return a schema as JSON. Its properties stay in order: texts have them in that order."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(found, Mapping):
            return json.dumps(dict(found), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"Guide.json_schema is not JSON: {error}") from None
    raise BadArgument(f"Guide.json_schema is {found!r}; it must be a JSON object")


def _as_texts(texts: Any) -> tuple[str, ...]:
    is_list = isinstance(texts, (list, tuple)) and bool(texts)
    if is_list and all(isinstance(one, str) and one for one in texts):
        return tuple(texts)  # a list could still grow
    raise BadArgument(
        f"Guide.choice is {texts!r}; it must be one or more texts in a list, none of them empty"
    )
