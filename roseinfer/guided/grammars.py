"""Guides as llguidance's grammars."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roseinfer.guided.guide import Guide

JSON_SPACE = r"( |\r?\n[ \t]{0,32})?"
"""What may stand between the parts of JSON: a space, or a new line and how far it is indented.
Where there is no bound, some models write nothing else any more."""


def grammar_of(guide: Guide, matcher: Any) -> str:
    """Return the grammar of a guide. ``matcher`` is llguidance's class."""
    if guide.json_object:
        return _of_schema('{"type": "object"}', matcher)
    if guide.json_schema is not None:
        return _of_schema(str(guide.json_schema), matcher)
    if guide.regex is not None:
        return str(matcher.grammar_from_regex(guide.regex))
    if guide.choice:
        words = " | ".join(map(json.dumps, guide.choice))
        return str(matcher.grammar_from_lark(f"start: {words}"))
    return str(matcher.grammar_from_lark(guide.grammar))


def _of_schema(schema: str, matcher: Any) -> str:
    options = {"whitespace_pattern": JSON_SPACE}
    return str(matcher.grammar_from_json_schema(schema, overrides=options))
