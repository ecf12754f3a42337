"""What is wrong with a body, in sentences that name the field and what it must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from roseinfer.server.refusals import Refused

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

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
