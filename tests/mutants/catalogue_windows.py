"""Bugs in layers that see a part of what is stored, or weigh it by traits of their own."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, WINDOWED, WINDOWED_PREFIXES, Mutant

_GROUPS = "roseinfer.kv.groups"
_GROUP_CALLS = "roseinfer.kv.group_calls"
_TRUNCATION = "roseinfer.kv.truncation"
_SUPPLY = "roseinfer.engine.request"
_PREFIXES = "roseinfer.engine.prefix_cache"
_REFERENCE = "roseinfer.attention.reference"
_CHUNK = "roseinfer.kernels.attend_chunks"
_DECODE = "roseinfer.kernels.attend_decode"
_SCORES = "roseinfer.kernels.scores"
_FIRST_GIVEN_BACK = "        at = group.first_seen(stored) // self.block_size - 1\n"


def _of_a_cache(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(WINDOWED,))


def _of_a_supply(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(WINDOWED_PREFIXES, ENGINE))


def _of_attention(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(ENGINE,))


MUTANTS = (
    _of_a_cache(
        "window-a-token-short",
        "A window is taken to begin one token later: the block with its first one is given back.",
        _GROUPS,
        "max(0, stored - self.window + 1)\n",
        "max(0, stored - self.window + 2)\n",
    ),
    _of_a_cache(
        "nothing-kept-taken-for-all",
        "A list of which every block was given back counts as one of which none was.",
        _GROUPS,
        "if block_id != SCRATCH), len(block_ids)\n",
        "if block_id != SCRATCH), 0\n",
    ),
    _of_a_cache(
        "given-back-and-still-listed",
        "Blocks are given back, and the scratch block takes their places in a copy of the list.",
        _GROUP_CALLS,
        _FIRST_GIVEN_BACK,
        _FIRST_GIVEN_BACK + "        block_ids = [*block_ids]\n",
    ),
    _of_a_cache(
        "need-of-the-neediest-group",
        "A pool that groups share is asked for the blocks of the group that needs most.",
        _GROUP_CALLS,
        "require(sum(seen.blocks_needed for seen in surveys))",
        "require(max(seen.blocks_needed for seen in surveys))",
    ),
    _of_a_cache(
        "cut-to-what-was-given-back",
        "A sequence may be cut to where the next token sees a block that was given back.",
        _TRUNCATION,
        "        if length and group.first_seen(length) // pool.block_size < gone:\n",
        "        if length and -(-length // pool.block_size) < gone:\n",
    ),
    _of_a_supply(
        "given-back-of-the-wrong-group",
        "Lists are counted by windows, not by groups: another list's blocks are given back.",
        _SUPPLY,
        "        for at, group in self._windows:\n            left =",
        "        for at, (_, group) in enumerate(self._windows):\n            left =",
    ),
    _of_a_supply(
        "hit-with-a-gap",
        "A prefix is found though the first block that the next token sees in it is gone.",
        _PREFIXES,
        "            if all(gap <= begin for gap",
        "            if all(gap <= begin + 1 for gap",
    ),
    _of_a_supply(
        "lent-and-counted-as-unused",
        "A block that completes a prefix can be evicted while the sequence that has it lives.",
        _PREFIXES,
        "            self._lent.add(own[group])\n",
        "",
    ),
    _of_attention(
        "chunk-begins-where-its-last-token-sees",
        "A tile of a chunk starts at what its last token sees, and its first one sees more.",
        _CHUNK,
        "tl.maximum(position - WINDOW + 1, 0)",
        "tl.maximum(position + count - WINDOW, 0)",
    ),
    _of_attention(
        "new-token-outside-its-window",
        "A kernel that stores the new token lets it see a window of tokens, and itself.",
        _DECODE,
        "tl.maximum(own - WINDOW + 1, 0)",
        "tl.maximum(length - WINDOW, 0)",
    ),
    _of_attention(
        "sink-lost-where-tokens-are-stored",
        "The sinks take no weight in a kernel that stores the new token.",
        _DECODE,
        "        CAPPED, SLOPED, SINKING,\n    )",
        "        CAPPED, SLOPED, SINKING and not APPENDS,\n    )",
    ),
    _of_attention(
        "cap-in-powers-of-e",
        "Scores are made for powers of two, and the cap that keeps them in bounds for those of e.",
        _SCORES,
        "cap * _LOG2_E,\n",
        "cap,\n",
    ),
    _of_attention(
        "slopes-in-powers-of-e",
        "Scores are made for powers of two, and what distance takes off them for those of e.",
        _SCORES,
        "other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS\n        scores -=",
        "other=0.0).to(tl.float32)\n        scores -=",
    ),
    _of_attention(
        "masked-within-the-cap",
        "Scores are capped behind the mask: what is not seen gets the least score, and a weight.",
        _REFERENCE,
        '    scores = scores.masked_fill(hidden, float("-inf"))\n',
        '    scores = scores.masked_fill(hidden, -(traits.cap or float("inf")))\n',
    ),
    _of_attention(
        "scratch-block-weighed-by-zero",
        "Of what left a window only the weights are zero, and zero times NaN is NaN.",
        _REFERENCE,
        "    unused = _hidden(distance, traits)[:, None, :, None]\n",
        "    unused = (distance < 0)[:, None, :, None]\n",
    ),
)
