"""Bugs in layers that see a part of what is stored, or weigh it by traits of their own."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, WINDOWED, WINDOWED_PREFIXES, Mutant

_GROUPS = "roseinfer.kv.groups"
_GROUP_CALLS = "roseinfer.kv.calls"
_TRUNCATION = "roseinfer.kv.truncation"
_SUPPLY = "roseinfer.engine.request"
_PREFIXES = "roseinfer.engine.prefix_cache"
_REFERENCE = "roseinfer.attention.reference"
_CHUNK = "roseinfer.kernels.triton.prefill_attention"
_DECODE = "roseinfer.kernels.triton.decode_attention"
_SCORES = "roseinfer.kernels.triton.softmax"


def _of_a_cache(
    name: str, wrong: str, module: str, function: str, find: str, replace: str
) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(WINDOWED,))


def _of_a_supply(
    name: str, wrong: str, module: str, function: str, find: str, replace: str
) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(WINDOWED_PREFIXES, ENGINE))


def _of_attention(
    name: str, wrong: str, module: str, function: str, find: str, replace: str
) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _of_a_cache(
        "window-a-token-short",
        "A window is taken to begin one token later: the block with its first one is given back.",
        _GROUPS,
        "LayerGroup.first_seen",
        "return 0 if self.window is None else max(0, stored - self.window + 1)",
        "return 0 if self.window is None else max(0, stored - self.window + 2)",
    ),
    _of_a_cache(
        "nothing-kept-taken-for-all",
        "A list of which every block was given back counts as one of which none was.",
        _GROUPS,
        "given_back",
        """
        return next(
            (at for at, block_id in enumerate(block_ids) if block_id != SCRATCH), len(block_ids)
        )
        """,
        """
        return next(
            (at for at, block_id in enumerate(block_ids) if block_id != SCRATCH), 0
        )
        """,
    ),
    _of_a_cache(
        "given-back-and-still-listed",
        "Blocks are given back, and the scratch block takes their places in a copy of the list.",
        _GROUP_CALLS,
        "LayerGroupMixin.give_back",
        "at = group.first_seen(stored) // self.block_size - 1",
        """
        at = group.first_seen(stored) // self.block_size - 1
        block_ids = [*block_ids]
        """,
    ),
    _of_a_cache(
        "need-of-the-neediest-group",
        "A pool that groups share is asked for the blocks of the group that needs most.",
        _GROUP_CALLS,
        "LayerGroupMixin.plan_groups",
        "self._pools[0].require_free_blocks(sum(seen.blocks_needed for seen in surveys))",
        "self._pools[0].require_free_blocks(max(seen.blocks_needed for seen in surveys))",
    ),
    _of_a_cache(
        "cut-to-what-was-given-back",
        "A sequence may be cut to where the next token sees a block that was given back.",
        _TRUNCATION,
        "check",
        """
        if length and group.first_seen(length) // pool.block_size < gone:
            ...
        """,
        """
        if length and -(-length // pool.block_size) < gone:
            ...
        """,
    ),
    _of_a_supply(
        "given-back-of-the-wrong-group",
        "Lists are counted by windows, not by groups: another list's blocks are given back.",
        _SUPPLY,
        "RequestBlockAllocator.publish_stored_blocks",
        """
        for at, group in self._windows:
            ...
        """,
        """
        for at, (_, group) in enumerate(self._windows):
            ...
        """,
    ),
    _of_a_supply(
        "hit-with-a-gap",
        "A prefix is found though the first block that the next token sees in it is gone.",
        _PREFIXES,
        "PrefixCache._longest_complete_prefix",
        """
        if all(gap <= begin for gap, begin in zip(gaps, begins, strict=True)):
            ...
        """,
        """
        if all(gap <= begin + 1 for gap, begin in zip(gaps, begins, strict=True)):
            ...
        """,
    ),
    _of_a_supply(
        "lent-and-counted-as-unused",
        "A block that completes a prefix can be evicted while the sequence that has it lives.",
        _PREFIXES,
        "PrefixCache._fill_missing_blocks",
        "self._borrowed_blocks.add(own[group])",
        "",
    ),
    _of_attention(
        "chunk-begins-where-its-last-token-sees",
        "A tile of a chunk starts at what its last token sees, and its first one sees more.",
        _CHUNK,
        "_chunk_kernel",
        "first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0",
        "first = tl.maximum(position + count - WINDOW, 0) if WINDOW else 0",
    ),
    _of_attention(
        "new-token-outside-its-window",
        "A kernel that stores the new token lets it see a window of tokens, and itself.",
        _DECODE,
        "_decode_kernel",
        "first = tl.maximum(own - WINDOW + 1, 0) if WINDOW else 0",
        "first = tl.maximum(length - WINDOW, 0) if WINDOW else 0",
    ),
    _of_attention(
        "sink-lost-where-tokens-are-stored",
        "The sinks take no weight in a kernel that stores the new token.",
        _DECODE,
        "_append_own_token",
        """
        return init_softmax(
            tl.sum(products, 1), values, scale, cap, sinks, slopes, heads, real,
            CAPPED, SLOPED, SINKING,
        )
        """,
        """
        return init_softmax(
            tl.sum(products, 1), values, scale, cap, sinks, slopes, heads, real,
            CAPPED, SLOPED, SINKING and not APPENDS,
        )
        """,
    ),
    _of_attention(
        "cap-in-powers-of-e",
        "Scores are made for powers of two, and the cap that keeps them in bounds for those of e.",
        _SCORES,
        "score_arguments",
        """
        return ScoreArguments(
            traits.scale * _LOG2_E if cap is None else traits.scale / cap,
            0.0 if cap is None else cap * _LOG2_E,
            unused if traits.sinks is None else traits.sinks,
            unused if traits.slopes is None else traits.slopes,
            traits.window or 0,
            cap is not None,
            traits.sinks is not None,
            traits.slopes is not None,
        )
        """,
        """
        return ScoreArguments(
            traits.scale * _LOG2_E if cap is None else traits.scale / cap,
            0.0 if cap is None else cap,
            unused if traits.sinks is None else traits.sinks,
            unused if traits.slopes is None else traits.slopes,
            traits.window or 0,
            cap is not None,
            traits.sinks is not None,
            traits.slopes is not None,
        )
        """,
    ),
    _of_attention(
        "slopes-in-powers-of-e",
        "Scores are made for powers of two, and what distance takes off them for those of e.",
        _SCORES,
        "transform_scores",
        "slope = tl.load(slopes + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS",
        "slope = tl.load(slopes + heads, real, other=0.0).to(tl.float32)",
    ),
    _of_attention(
        "masked-within-the-cap",
        "Scores are capped behind the mask: what is not seen gets the least score, and a weight.",
        _REFERENCE,
        "_attend",
        """
        scores = scores.masked_fill(hidden, float("-inf"))
        """,
        """
        scores = scores.masked_fill(hidden, -(traits.softcap or float("inf")))
        """,
    ),
    _of_attention(
        "scratch-block-weighed-by-zero",
        "Of what left a window only the weights are zero, and zero times NaN is NaN.",
        _REFERENCE,
        "append_and_attend_reference",
        "unused = _attention_mask(distance, traits)[:, None, :, None]",
        "unused = (distance < 0)[:, None, :, None]",
    ),
)
