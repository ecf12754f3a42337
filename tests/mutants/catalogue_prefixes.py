"""Bugs in the prefix cache that are found without an engine."""

from __future__ import annotations

from tests.mutants.mutant import HASHED, PREFIXED, RESET_PREFIXES, Mutant

_PREFIXES = "roseinfer.engine.prefix_cache"


MUTANTS = (
    Mutant(
        "hash-collision-taken-for-equal",
        "A block is found by its hash, without a comparison of tokens.",
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
        "max_tokens = len(tokens) - 1",
        "max_tokens = len(tokens)",
        rows=("S4",),
        targets=(PREFIXED,),
    ),
    Mutant(
        "tail-in-use-forever",
        "A tail that a sequence has copied still counts as in use.",
        _PREFIXES,
        "PrefixCache.insert",
        "self._release_entry(held_prefix.tail)",
        "",
        targets=(PREFIXED,),
    ),
    Mutant(
        "tail-outlives-its-parent",
        "Children of an evicted block stay in the prefix cache.",
        _PREFIXES,
        "PrefixCache._remove_subtree",
        "leaving += each.children",
        "pass",
        rows=("2",),
        targets=(PREFIXED,),
    ),
    Mutant(
        "held-entries-counted-as-evictable",
        "The count of evictable blocks keeps those that a sequence holds again.",
        _PREFIXES,
        "PrefixCache._acquire",
        """
        if entry in self.evictable_entries:
            del self.evictable_entries[entry]
            self.num_evictable_blocks -= self._num_blocks(entry)
        """,
        """
        if entry in self.evictable_entries:
            del self.evictable_entries[entry]
        """,
        targets=(PREFIXED,),
    ),
    Mutant(
        "evicted-while-blocks-are-free",
        "A step evicts as many cached blocks as it needs, though others are free.",
        "roseinfer.engine.request",
        "RequestBlockAllocator.ensure",
        "missing = blocks - self._kv.num_free_blocks(0)",
        "missing = blocks",
        targets=(PREFIXED,),
    ),
    Mutant(
        "running-sequences-cached-after-a-reset",
        "A reset removes all entries, and sequences that run cache their blocks of before later.",
        _PREFIXES,
        "PrefixCache.reset",
        """
        self._root.cached = False
        self._root = _new_root()
        """,
        "",
        rows=("T12",),
        targets=(RESET_PREFIXES,),
    ),
)
