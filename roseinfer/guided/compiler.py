"""Guides compiled for a tokenizer, and the matcher of each text."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roseinfer.errors import TooBusy
from roseinfer.guided.grammar import (
    compile_guide,
    read_tokenizer,
    reject_inexact_numbers,
)
from roseinfer.guided.sandbox import GuideSandbox

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import numpy.typing as npt

    from roseinfer.guided.guide import Guide

_MAX_CACHED_GRAMMARS = 64
"""Most grammars in the cache, the most recently used. Together they take at most the memory that
one guide may take."""
_MAX_LIVE_MEMORY_RATIO = 4
"""Memory of all live grammars, as a multiple of the memory that one guide may take."""


class GuideCompiler:
    """A compiler of guides with a cache of grammars. It works in the thread that calls it."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        eos_token_ids: Collection[int],
        *,
        cpu_seconds: float,
        memory_mb: int,
    ) -> None:
        """Create a compiler.

        ``vocabulary`` is the number of tokens of the model, which may differ from its tokenizer's.
        A guide may take ``cpu_seconds`` of processor time and ``memory_mb`` megabytes.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._limits = cpu_seconds, memory_mb
        self._lock = threading.Lock()
        self._tools: tuple[Any, int, GuideSandbox] | None = None
        """llguidance's tokenizer, its end-of-grammar token, and the sandbox; None before first
        use."""
        self._grammar_cache: OrderedDict[Guide, Grammar] = OrderedDict()
        self._live_grammars: weakref.WeakSet[Grammar] = weakref.WeakSet()
        """Grammars that are cached or used by a matcher."""

    def new_matcher(self, guide: Guide, *, ignore_eos: bool = False) -> GuideMatcher:
        """Return a matcher at the beginning of a text.

        This raises for a guide that cannot be compiled, at all or with this tokenizer.
        """
        with self._lock:
            if self._tools is None:
                source, ll_tokenizer = read_tokenizer(self._tokenizer, self._vocabulary)
                sandbox = GuideSandbox(source, *self._limits)
                self._tools = ll_tokenizer, source.grammar_end_token, sandbox
            tokenizer, grammar_end_token, sandbox = self._tools
            grammar = self._grammar_cache.get(guide)
            if grammar is not None:
                self._grammar_cache.move_to_end(guide)
        if grammar is None:  # without the lock, so that other threads do not wait
            reject_inexact_numbers(guide)
            megabytes = sandbox.validate(guide)
            self._evict_grammars(megabytes)
            grammar = Grammar(compile_guide(guide, tokenizer), megabytes)
            with self._lock:
                self._grammar_cache[guide] = grammar
                self._live_grammars.add(grammar)
        return GuideMatcher(grammar, grammar_end_token, () if ignore_eos else self._eos_token_ids)

    def _evict_grammars(self, megabytes: int) -> None:
        """Evict grammars for one of ``megabytes``; raise if live ones take too much memory."""
        max_megabytes = self._limits[1]
        with self._lock:
            cached = sum(each.megabytes for each in self._grammar_cache.values())
            while self._grammar_cache and (
                len(self._grammar_cache) >= _MAX_CACHED_GRAMMARS
                or cached + megabytes > max_megabytes
            ):
                _, evicted = self._grammar_cache.popitem(last=False)
                cached -= evicted.megabytes
                del evicted
            alive = sum(each.megabytes for each in self._live_grammars)
        if alive + megabytes > _MAX_LIVE_MEMORY_RATIO * max_megabytes:
            raise TooBusy(
                f"guides: those in use take {alive} MB of memory, and this one takes {megabytes} "
                "MB more; try again later, or raise guide_memory_mb"
            )


# Matchers: the position of a text in its grammar, and the tokens allowed next.


_BITS = 32


@dataclass(eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A compiled grammar, alive while it is cached or used by a matcher."""

    matcher: Any
    """llguidance's matcher, at the beginning of a text."""
    megabytes: int


class GuideMatcher:
    """The state of one text in its grammar. Only the engine's thread uses it."""

    def __init__(
        self, grammar: Grammar, grammar_end_token: int, eos_token_ids: Iterable[int]
    ) -> None:
        """Begin a text.

        ``eos_token_ids`` end the text; ``grammar_end_token`` is llguidance's token for the end of
        the grammar, and is not part of any text.
        """
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._end_of_grammar = grammar_end_token
        self._eos_token_ids = tuple(eos_token_ids)
        self.may_end = False
        """True if the text may end at the position of the last bitmask."""

    def fill_bitmask(self, row: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the tokens allowed next, in words of 32, and clear all others.

        End-of-sequence tokens are allowed where the grammar may end. Elsewhere they are not, except
        for one that is text too, if no other token is allowed. If the matcher fails, no token is
        allowed.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            row[:] = 0
            return
        bitmask = min(len(row), len(allowed))
        row[:bitmask] = allowed[:bitmask]
        row[bitmask:] = 0
        self.may_end = _bit(allowed, self._end_of_grammar)
        _set(row, self._end_of_grammar, on=False)
        for token in self._eos_token_ids:
            _set(row, token, on=self.may_end)
        if not (self.may_end or row.any()):
            for token in self._eos_token_ids:
                _set(row, token, on=_bit(allowed, token))

    def accept_token(self, token: int) -> bool:
        """Advance by a token of the text, and return True if no token may follow it."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def has_failed(self) -> bool:
        return bool(self._matcher.is_error())

    @property
    def failure(self) -> str:
        """The reason why no token is allowed: the matcher failed, or the vocabulary has none."""
        if self.has_failed:
            lines = self._matcher.get_error().splitlines() or ["the matcher stopped"]
            return f"the guide is too complex at this token: {lines[0]}"
        return "the guide allows none of the model's tokens"


def _bit(words: npt.NDArray[np.uint32], token: int) -> bool:
    word = token // _BITS
    return word < len(words) and bool(int(words[word]) >> token % _BITS & 1)


def _set(row: npt.NDArray[np.uint32], token: int, *, on: bool) -> None:
    word, bit = token // _BITS, np.uint32(1 << token % _BITS)
    if word < len(row):
        row[word] = row[word] | bit if on else row[word] & ~bit
