"""Grammars for a tokenizer, which are kept."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from roseinfer.errors import TooBusy
from roseinfer.guided.grammars import compile_guide, read_tokenizer
from roseinfer.guided.guide_progress import Grammar, GuideProgress
from roseinfer.guided.guide_trial import GuideTrial
from roseinfer.guided.numbers import refuse_inexact_numbers

if TYPE_CHECKING:
    from collections.abc import Collection

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
