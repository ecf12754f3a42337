"""Numbers of JSON schemas that a grammar would not keep exactly."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.guided.guide import Guide

LARGEST_EXACT = (1 << 53) - 1
"""llguidance computes bounds as float64, and adds 1 to those that are exclusive."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_VALUES = {"const", "enum"}
_IGNORED = {"default", "examples"}
_NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Keywords of schemas by names, any of which may be that of a keyword."""
_IN_GRAMMAR = re.compile(r"%json\s*(?=\{)")


def refuse_inexact_numbers(guide: Guide) -> None:
    """Raise if a schema of a guide has bounds or whole numbers that it would not get exactly."""
    for schema in _schemas(guide):
        for keyword, value in _numbers(schema):
            if abs(value) > LARGEST_EXACT:
                raise BadArgument(
                    f"this form of text cannot be followed: {keyword} {short_repr(value)} is "
                    f"beyond {LARGEST_EXACT} (2^53 - 1), up to which numbers are exact; use a "
                    f"number from -{LARGEST_EXACT} to {LARGEST_EXACT}, or leave {keyword} out"
                )


def _schemas(guide: Guide) -> Iterator[Any]:
    text = str(guide.grammar or guide.json_schema or "")
    begins = [found.end() for found in _IN_GRAMMAR.finditer(text)] if guide.grammar else [0]
    for begin in begins if text else ():
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, begin)
        except json.JSONDecodeError:
            continue  # whoever compiles it says where it is wrong, if it is a schema at all
        except (ValueError, RecursionError) as error:
            raise BadArgument(
                f"this form of text cannot be followed: a schema in it is too large: {error}"
            ) from None
        yield schema


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield the bounds in a schema, and the whole numbers among its values, with their keywords."""
    due: list[tuple[Any, str]] = [(schema, "")]
    """Parts of the schema, each with the keyword that it is a value of, if it is one."""
    while due:
        part, values_of = due.pop()
        if isinstance(part, list):
            due += ((each, values_of) for each in part)
        elif isinstance(part, dict) and values_of:
            due += ((each, values_of) for each in part.values())
        elif isinstance(part, dict):
            for keyword, value in part.items():
                if keyword in _BOUNDS and type(value) in (int, float):
                    yield keyword, value
                elif keyword in _NAMED and isinstance(value, dict):
                    due += ((each, "") for each in value.values())
                elif keyword not in _IGNORED:
                    due.append((value, keyword if keyword in _VALUES else ""))
        elif values_of and type(part) is int:
            yield values_of, part
