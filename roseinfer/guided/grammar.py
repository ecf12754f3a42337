"""Guides as grammars for a tokenizer. Nothing else imports llguidance."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, ConfigError, short_repr, with_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.guided.guide import Guide

JSON_SPACE = r"( |\r?\n[ \t]{0,32})?"
"""What may stand between the parts of JSON: a space, or a new line and how far it is indented.
Where there is no bound, some models write nothing else any more."""

_MOST_STATES = 50_000
"""States of a grammar's lexer: some 2 kB each."""
_STEP_FUEL = 100_000
"""Expressions that the lexer may make for one mask. The largest enum needs nearly as many, and a
few may take as long if each is as long as a pattern: 0.6 s where that has 24,000 characters."""
_LONGEST_REASON = 500
_SHOWN_LINES = re.compile(r"\n +\d+ \| ")
"""Beginning of a grammar's lines in an error, left out: clients may write it otherwise."""
_SAMPLE = 'aé好😀 {"b": [10,\n2]}'
"""Where only one text can come next, it is cut into tokens by the tokenizer itself."""
_NO_TOKEN = "NoExtensionBias"
"""In what the matcher says where no token may come."""
_END = "<|where the grammar may end|>"


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer as llguidance reads it, in a form that another process can read too."""

    json: str
    vocabulary: int
    end_of_grammar: int
    """A token of no text, by which llguidance says that a text may end."""

    def tokenizer(self) -> Any:
        """Return llguidance's tokenizer, which takes a second or two to make if it is large."""
        from llguidance import LLTokenizer

        return LLTokenizer(self.json, n_vocab=self.vocabulary, eos_token=self.end_of_grammar)


def read_tokenizer(tokenizer: Any, vocabulary: int) -> tuple[TokenizerSource, Any]:
    """Return the source for a tokenizer of transformers, and llguidance's tokenizer made of it.

    ``vocabulary`` is how many tokens the model has.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError(
            "texts of a form need llguidance, which is not installed: pip install '.[guided]' in "
            "the folder of roseinfer's sources adds it"
        ) from None
    from tokenizers import Tokenizer

    if tokenizer is None:
        raise BadArgument("texts of a form need a tokenizer, and this model came without one")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _unfit(tokenizer, "it is not one of the library tokenizers")
    try:
        own = Tokenizer.from_str(backend.to_str())  # the original is in use
        own.no_padding()
        own.no_truncation()
        own.add_special_tokens([_END])
        end = own.token_to_id(_END)
        assert end is not None
        if backend.id_to_token(end) is not None:
            raise _unfit(tokenizer, f"two of its tokens have the id {end}")
        source = TokenizerSource(own.to_str(), max(vocabulary, end + 1), end)
        made = source.tokenizer()
        if (read := made.decode_str(made.tokenize_str(_SAMPLE))) != _SAMPLE:
            raise _unfit(tokenizer, f"it reads {_SAMPLE!r} as {read!r}")
        return source, made
    except (BadArgument, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise _unfit(tokenizer, with_kind(error)) from None


def compile_guide(guide: Guide, tokenizer: Any) -> Any:
    """Return the matcher of a guide at the beginning of a text, or raise the reason against it.

    ``tokenizer`` is llguidance's.
    """
    # It is here already, since there is a tokenizer of it.
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=_MOST_STATES, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
    )
    try:
        matcher = LLMatcher(tokenizer, _grammar_of(guide, LLMatcher), log_level=0, limits=limits)
    except ValueError as error:
        raise BadArgument(f"this form of text cannot be followed: {error}") from None
    if not matcher.is_error() and not _may_begin(matcher):
        raise BadArgument("this form of text cannot be followed: no text is of this form")
    refuse_if_too_hard(matcher)
    return matcher


def refuse_if_too_hard(matcher: Any) -> None:
    """Raise the reason if a matcher has given up, but for lack of a token in the vocabulary."""
    if matcher.is_error() and _NO_TOKEN not in matcher.get_error():
        said = _SHOWN_LINES.split(matcher.get_error(), 1)[0]
        why = " ".join(said.split())
        if len(why) > _LONGEST_REASON:  # it may repeat all of a pattern
            why = f"{why[:_LONGEST_REASON]}..."
        raise BadArgument(f"this form of text cannot be followed: {why}")


def _may_begin(matcher: Any) -> bool:
    """Tell if there is a token with which a text can begin. What is too hard, its step will say."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return _NO_TOKEN not in (copy.get_error() or "")


def _grammar_of(guide: Guide, matcher: Any) -> str:
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


def _unfit(tokenizer: Any, why: str) -> BadArgument:
    return BadArgument(f"no form of text can be followed with {type(tokenizer).__name__}: {why}")


# Numbers of JSON schemas that a grammar would not keep exactly.


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
