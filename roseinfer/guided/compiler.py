"""Grammars for a tokenizer, which are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from roseinfer.guided.grammars import compile_guide, read_tokenizer
from roseinfer.guided.guide_progress import GuideProgress
from roseinfer.guided.guide_trial import GuideTrial
from roseinfer.guided.numbers import refuse_inexact_numbers

if TYPE_CHECKING:
    from collections.abc import Collection

    from roseinfer.guided.guide import Guide

_MOST_KEPT = 64
"""So many grammars are kept, those that were asked for last."""


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
        self._kept: OrderedDict[Guide, Any] = OrderedDict()
        """Grammars at their beginning, of which each text gets a copy."""

    def progress(self, guide: Guide, *, ignore_eos: bool = False) -> GuideProgress:
        """Return what follows a guide from the beginning of a text.

        It raises for a guide that cannot be followed, or not with this tokenizer.
        """
        with self._lock:
            if self._made is None:
                source, made = read_tokenizer(self._tokenizer, self._vocabulary)
                self._made = made, source.end_of_grammar, GuideTrial(source, *self._limits)
            tokenizer, end_of_grammar, trial = self._made
            matcher = self._copy(guide)
        if matcher is None:  # others need not wait for it
            refuse_inexact_numbers(guide)
            trial.require(guide)
            first = compile_guide(guide, tokenizer)
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
