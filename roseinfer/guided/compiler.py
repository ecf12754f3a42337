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
    refuse_inexact_numbers,
)
from roseinfer.guided.trial import GuideTrial

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import numpy.typing as npt

    from roseinfer.guided.guide import Guide

_MOST_KEPT = 64
"""So many grammars are kept, those that were asked for last, with the memory of one at most."""
_MOST_ALIVE = 4
"""Those that texts follow may take so many times the memory of one."""


class GuideCompiler:
    """Makes what follows guides. Any thread may ask; the one that asks does the work."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        end_tokens: Collection[int],
        *,
        cpu_seconds: float,
        memory_mb: int,
    ) -> None:
        """``vocabulary`` is how many tokens the model has; its tokenizer may have others.

        A guide may take so much processor time and memory.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = end_tokens
        self._limits = cpu_seconds, memory_mb
        self._lock = threading.Lock()
        self._made: tuple[Any, int, GuideTrial] | None = None
        """llguidance's tokenizer, its token where a grammar may end, and what tries guides."""
        self._kept: OrderedDict[Guide, Grammar] = OrderedDict()
        self._alive: weakref.WeakSet[Grammar] = weakref.WeakSet()
        """Those that are kept or that texts follow."""

    def progress(self, guide: Guide, *, ignore_eos: bool = False) -> GuideProgress:
        """Return what follows a guide from the beginning of a text.

        It raises for a guide that cannot be followed, or not with this tokenizer.
        """
        with self._lock:
            if self._made is None:
                source, made = read_tokenizer(self._tokenizer, self._vocabulary)
                self._made = made, source.end_of_grammar, GuideTrial(source, *self._limits)
            tokenizer, end_of_grammar, trial = self._made
            grammar = self._kept.get(guide)
            if grammar is not None:
                self._kept.move_to_end(guide)
        if grammar is None:  # others need not wait for it
            refuse_inexact_numbers(guide)
            megabytes = trial.require(guide)
            self._make_room(megabytes)
            grammar = Grammar(compile_guide(guide, tokenizer), megabytes)
            with self._lock:
                self._kept[guide] = grammar
                self._alive.add(grammar)
        return GuideProgress(grammar, end_of_grammar, () if ignore_eos else self._end_tokens)

    def _make_room(self, megabytes: int) -> None:
        """Evict grammars for one that takes so much memory, or raise if texts follow too many."""
        most = self._limits[1]
        with self._lock:
            kept = sum(each.megabytes for each in self._kept.values())
            while self._kept and (len(self._kept) >= _MOST_KEPT or kept + megabytes > most):
                _, evicted = self._kept.popitem(last=False)
                kept -= evicted.megabytes
                del evicted
            alive = sum(each.megabytes for each in self._alive)
        if alive + megabytes > _MOST_ALIVE * most:
            raise TooBusy(
                f"the forms of texts that are generated take {alive} MB of memory, and this one "
                f"{megabytes} MB: try again later, or raise guide_memory_mb"
            )


# How far a text has come in its grammar, and which tokens it can go on with.


_BITS = 32


@dataclass(eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A grammar at its beginning, which is alive while a text follows it."""

    matcher: Any
    megabytes: int


class GuideProgress:
    """Follows one text. Only the thread that runs the engine uses it."""

    def __init__(self, grammar: Grammar, end_of_grammar: int, end_tokens: Iterable[int]) -> None:
        """``end_tokens`` end the text; ``end_of_grammar`` is the matcher's own, of no text."""
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._end_of_grammar = end_of_grammar
        self._end_tokens = tuple(end_tokens)
        self.may_end = False
        """True if the text may end where the last row of bits was for."""

    def fill(self, row: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next, in words of 32, and clear all others.

        Tokens that end a text may come where the grammar may end. Elsewhere they may not, but for
        one that is text too where no other can come. If the matcher gives up, no token may come.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            row[:] = 0
            return
        words = min(len(row), len(allowed))
        row[:words] = allowed[:words]
        row[words:] = 0
        self.may_end = _bit(allowed, self._end_of_grammar)
        _set(row, self._end_of_grammar, on=False)
        for token in self._end_tokens:
            _set(row, token, on=self.may_end)
        if not (self.may_end or row.any()):
            for token in self._end_tokens:
                _set(row, token, on=_bit(allowed, token))

    def take(self, token: int) -> bool:
        """Go on by a token of the text, and return True if nothing may come behind it."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def gave_up(self) -> bool:
        return bool(self._matcher.is_error())

    @property
    def failure(self) -> str:
        """Why there is no next token: the matcher gave up, or the vocabulary has none."""
        if self.gave_up:
            said = self._matcher.get_error().splitlines() or ["it broke off"]
            return f"the form of this text is too hard to follow: {said[0]}"
        return "the form of this text allows none of the tokens that the model can choose"


def _bit(words: npt.NDArray[np.uint32], token: int) -> bool:
    word = token // _BITS
    return word < len(words) and bool(int(words[word]) >> token % _BITS & 1)


def _set(row: npt.NDArray[np.uint32], token: int, *, on: bool) -> None:
    word, bit = token // _BITS, np.uint32(1 << token % _BITS)
    if word < len(row):
        row[word] = row[word] | bit if on else row[word] & ~bit
