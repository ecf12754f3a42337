"""Grammars: guides compiled by llguidance for a tokenizer. No other module imports llguidance."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, ConfigError, error_with_type, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.guided.guide import Guide

JSON_WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
"""Pattern of whitespace between the parts of JSON: a space, or a new line and its indentation.
Without a bound, some models generate whitespace for ever."""

_MAX_STATES = 50_000
"""Most states of a grammar's lexer, of some 2 kB each."""
_STEP_FUEL = 100_000
"""Most expressions that the lexer may build for one mask. The largest enum needs nearly as many.
A few long ones may take as much time: 0.6 s for a pattern of 24,000 characters."""
_LONGEST_REASON = 500
"""Most characters of an error's reason."""
_SHOWN_LINES = re.compile(r"\n +\d+ \| ")
"""Beginning of the grammar's lines in an error, which are left out: they are llguidance's grammar,
and the client may have sent something else."""
_SAMPLE = 'aé好😀 {"b": [10,\n2]}'
"""Sample text for a round trip through the tokenizer, which llguidance itself uses to split text
that is the only possible continuation."""
_NO_TOKEN = "NoExtensionBias"
"""Part of the matcher's error when no token is allowed."""
_END = "<|where the grammar may end|>"


@dataclass(frozen=True, slots=True)
class SerializedTokenizer:
    """A tokenizer in the form that llguidance reads, which can be sent to another process."""

    json: str
    vocabulary: int
    grammar_end_token: int
    """Token without text: llguidance allows it where a text may end."""

    def tokenizer(self) -> Any:
        """Return llguidance's tokenizer; a large one takes a second or two to build."""
        from llguidance import LLTokenizer

        return LLTokenizer(self.json, n_vocab=self.vocabulary, eos_token=self.grammar_end_token)


def read_tokenizer(tokenizer: Any, vocabulary: int) -> tuple[SerializedTokenizer, Any]:
    """Return the serialized form of a transformers tokenizer, and llguidance's tokenizer.

    ``vocabulary`` is the number of tokens of the model.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError(
            "guides need llguidance, which is not installed: run pip install '.[guided]' in the "
            "folder of roseinfer's sources"
        ) from None
    from tokenizers import Tokenizer

    if tokenizer is None:
        raise BadArgument("guides need a tokenizer, and this model has none; give a tokenizer")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _unfit_tokenizer_error(tokenizer, "it is not one of the library tokenizers")
    try:
        copy = Tokenizer.from_str(backend.to_str())  # the original is in use
        copy.no_padding()
        copy.no_truncation()
        copy.add_special_tokens([_END])
        end = copy.token_to_id(_END)
        assert end is not None
        if backend.id_to_token(end) is not None:
            raise _unfit_tokenizer_error(tokenizer, f"two of its tokens have the id {end}")
        source = SerializedTokenizer(copy.to_str(), max(vocabulary, end + 1), end)
        ll_tokenizer = source.tokenizer()
        decoded = ll_tokenizer.decode_str(ll_tokenizer.tokenize_str(_SAMPLE))
        if decoded != _SAMPLE:
            raise _unfit_tokenizer_error(tokenizer, f"it reads {_SAMPLE!r} as {decoded!r}")
        return source, ll_tokenizer
    except (BadArgument, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise _unfit_tokenizer_error(tokenizer, error_with_type(error)) from None


def compile_guide(guide: Guide, tokenizer: Any) -> Any:
    """Return the matcher of a guide at the beginning of a text, or raise the reason of a refusal.

    ``tokenizer`` is llguidance's.
    """
    # It is installed: ``tokenizer`` was built by it.
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=_MAX_STATES, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
    )
    try:
        matcher = LLMatcher(tokenizer, _grammar_of(guide, LLMatcher), log_level=0, limits=limits)
    except ValueError as error:
        raise BadArgument(f"the constraint cannot be compiled: {error}") from None
    if not matcher.is_error() and not _allows_first_token(matcher):
        raise BadArgument("the constraint cannot be compiled: no text matches it")
    raise_matcher_error(matcher)
    return matcher


def raise_matcher_error(matcher: Any) -> None:
    """Raise the reason if a matcher has failed, unless it only lacks an allowed token."""
    if matcher.is_error() and _NO_TOKEN not in matcher.get_error():
        message = _SHOWN_LINES.split(matcher.get_error(), 1)[0]
        reason = " ".join(message.split())
        if len(reason) > _LONGEST_REASON:  # it may repeat all of a pattern
            reason = f"{reason[:_LONGEST_REASON]}..."
        raise BadArgument(f"the constraint cannot be compiled: {reason}")


def _allows_first_token(matcher: Any) -> bool:
    """Return True unless no token can begin a text; later steps report other errors."""
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
    options = {"whitespace_pattern": JSON_WHITESPACE}
    return str(matcher.grammar_from_json_schema(schema, overrides=options))


def _unfit_tokenizer_error(tokenizer: Any, reason: str) -> BadArgument:
    return BadArgument(f"guides do not work with {type(tokenizer).__name__}: {reason}")


# Numbers in JSON schemas that llguidance would not represent exactly.


MAX_EXACT_INTEGER = (1 << 53) - 1
"""Largest exact number: llguidance computes bounds as float64, and adds 1 to exclusive ones."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_VALUES = {"const", "enum"}
_IGNORED = {"default", "examples"}
_NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Keywords whose values are schemas by arbitrary names, which may equal those of keywords."""
_IN_GRAMMAR = re.compile(r"%json\s*(?=\{)")


def reject_inexact_numbers(guide: Guide) -> None:
    """Raise if a schema of a guide has bounds or integers that would not be exact."""
    for schema in _schemas(guide):
        for keyword, value in _numbers(schema):
            if abs(value) > MAX_EXACT_INTEGER:
                raise BadArgument(
                    f"the constraint cannot be compiled: {keyword} {short_repr(value)} is beyond "
                    f"{MAX_EXACT_INTEGER} (2^53 - 1), up to which numbers are exact; use a number "
                    f"from -{MAX_EXACT_INTEGER} to {MAX_EXACT_INTEGER}, or leave {keyword} out"
                )


def _schemas(guide: Guide) -> Iterator[Any]:
    text = str(guide.grammar or guide.json_schema or "")
    begins = [match.end() for match in _IN_GRAMMAR.finditer(text)] if guide.grammar else [0]
    for begin in begins if text else ():
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, begin)
        except json.JSONDecodeError:
            continue  # the compiler reports what is wrong, if this is a schema at all
        except (ValueError, RecursionError) as error:
            raise BadArgument(
                f"the constraint cannot be compiled: a schema in it is too large: {error}"
            ) from None
        yield schema


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield the bounds in a schema, and the integers among its values, with their keywords."""
    pending: list[tuple[Any, str]] = [(schema, "")]
    """Parts of the schema to visit, each with ``const`` or ``enum`` if it is a value of that."""
    while pending:
        part, values_of = pending.pop()
        if isinstance(part, list):
            pending += ((each, values_of) for each in part)
        elif isinstance(part, dict) and values_of:
            pending += ((each, values_of) for each in part.values())
        elif isinstance(part, dict):
            for keyword, value in part.items():
                if keyword in _BOUNDS and type(value) in (int, float):
                    yield keyword, value
                elif keyword in _NAMED and isinstance(value, dict):
                    pending += ((each, "") for each in value.values())
                elif keyword not in _IGNORED:
                    pending.append((value, keyword if keyword in _VALUES else ""))
        elif values_of and type(part) is int:
            yield values_of, part
