"""Grammars for a tokenizer, which are kept. Nothing else imports llguidance."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, ConfigError, with_kind
from roseinfer.guided.grammars import grammar_of
from roseinfer.guided.guide_progress import GuideProgress

if TYPE_CHECKING:
    from collections.abc import Collection

    from roseinfer.guided.guide import Guide

_MOST_KEPT = 64
"""So many grammars are kept, those that were asked for last."""
_MOST_STATES = 50_000
"""States of a grammar's lexer: some 2 kB each. The other limits are llguidance's own. They bound
a step of one text to some 20 ms (100 where all that can come is one text of tens of thousands of
characters), and the preparation of a guide to some 200."""
_LONGEST_REASON = 500
_SHOWN_LINES = re.compile(r"\n +\d+ \| ")
"""What begins the lines of a grammar in an error, which whoever asked may not have written so."""
_SAMPLE = 'aé好😀 {"b": [10,\n2]}'
"""Where only one text can come next, it is cut into tokens by the tokenizer itself."""
_NO_TOKEN = "NoExtensionBias"
"""In what the matcher says where no token may come."""
_END = "<|where the grammar may end|>"


class GuideCompiler:
    """Makes what follows guides. Any thread may ask; the one that asks does the work."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Collection[int]) -> None:
        """``vocabulary`` is how many tokens the model has; its tokenizer may have others."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = end_tokens
        self._lock = threading.Lock()
        self._made: tuple[Any, int] | None = None
        """llguidance's tokenizer, and a token of no text by which it says that a text may end."""
        self._kept: OrderedDict[Guide, Any] = OrderedDict()
        """Grammars at their beginning, of which each text gets a copy."""

    def progress(self, guide: Guide, *, ignore_eos: bool = False) -> GuideProgress:
        """Return what follows a guide from the beginning of a text.

        It raises for a guide that cannot be followed, or not with this tokenizer.
        """
        with self._lock:
            if self._made is None:
                self._made = _tokenizer_of(self._tokenizer, self._vocabulary)
            tokenizer, end_of_grammar = self._made
            matcher = self._copy(guide)
        if matcher is None:
            first = _compile(guide, tokenizer)  # others need not wait for it
            with self._lock:
                self._kept[guide] = first
                matcher = self._copy(guide)
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return GuideProgress(matcher, end_of_grammar, () if ignore_eos else self._end_tokens)

    def _copy(self, guide: Guide) -> Any:
        if guide not in self._kept:
            return None
        self._kept.move_to_end(guide)
        return self._kept[guide].deep_copy()


def _compile(guide: Guide, tokenizer: Any) -> Any:
    # It is here already, since there is a tokenizer of it.
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, grammar_of(guide, LLMatcher), log_level=0, limits=limits)
    except ValueError as error:
        raise BadArgument(f"this form of text cannot be followed: {error}") from None
    if not matcher.is_error() and not _may_begin(matcher):
        raise BadArgument("this form of text cannot be followed: no text is of this form")
    if matcher.is_error():
        said = _SHOWN_LINES.split(matcher.get_error(), 1)[0]
        why = " ".join(said.split())
        if len(why) > _LONGEST_REASON:  # it may repeat all of a pattern
            why = f"{why[:_LONGEST_REASON]}..."
        raise BadArgument(f"this form of text cannot be followed: {why}")
    return matcher


def _may_begin(matcher: Any) -> bool:
    """Tell if there is a token with which a text can begin. What is too hard, its step will say."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return _NO_TOKEN not in (copy.get_error() or "")


def _tokenizer_of(tokenizer: Any, vocabulary: int) -> tuple[Any, int]:
    """Return llguidance's tokenizer for one of transformers, and its token for an end."""
    try:
        from llguidance import LLTokenizer
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
        made = LLTokenizer(own.to_str(), n_vocab=max(vocabulary, end + 1), eos_token=end)
        if (read := made.decode_str(made.tokenize_str(_SAMPLE))) != _SAMPLE:
            raise _unfit(tokenizer, f"it reads {_SAMPLE!r} as {read!r}")
        return made, end
    except (BadArgument, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise _unfit(tokenizer, with_kind(error)) from None


def _unfit(tokenizer: Any, why: str) -> BadArgument:
    return BadArgument(f"no form of text can be followed with {type(tokenizer).__name__}: {why}")
