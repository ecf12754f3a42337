"""Bugs in the prefix cache that need no engine: they show where it is driven on its own."""

from __future__ import annotations

from tests.mutants.mutant import HASHED, PREFIXED, Mutant

_PREFIXES = "roseinfer.engine.prefix_cache"


MUTANTS = (
    Mutant(
        "tokens-with-one-hash-taken-for-equal",
        "A block is found by its hash, and its tokens are not compared.",
        _PREFIXES,
        "PrefixEntry.continues",
        "return self.parent is parent and self.tokens == tokens",
        "return self.parent is parent",
        rows=("24", "S3"),
        targets=(HASHED,),
    ),
    Mutant(
        "prompt-matched-to-its-last-token",
        "A prefix may be as long as the prompt, which leaves no token to compute.",
        _PREFIXES,
        "PrefixCache.match",
        "most = len(tokens) - 1",
        "most = len(tokens)",
        rows=("S4",),
        targets=(PREFIXED,),
    ),
    Mutant(
        "tail-in-use-for-ever",
        "A tail that a sequence has copied still counts as used by it.",
        _PREFIXES,
        "PrefixCache.insert",
        "self._release_entry(held.tail)",
        "",
        targets=(PREFIXED,),
    ),
    Mutant(
        "tail-that-outlives-its-parent",
        "What is below a block stays in the cache when that is taken out.",
        _PREFIXES,
        "PrefixCache._remove_subtree",
        "leaving += each.children",
        "pass",
        rows=("2",),
        targets=(PREFIXED,),
    ),
)
