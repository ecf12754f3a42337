"""Bugs in what a CPU runs by default: batched attention, and Llama on joined weights."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_BATCHED = "roseinfer.attention.batched"
_JOINED = "roseinfer.models.joined_llama"


def _mutant(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "padding-of-short-sequences-attended",
        "A short sequence attends to the padding that makes it as long as another.",
        _BATCHED,
        "BatchedAttention._plan",
        "positions = end - tokens + arange(tokens)",
        "positions = end * 0 + length - tokens + arange(tokens)",
    ),
    _mutant(
        "heads-of-a-block-gathered-together",
        "Blocks are gathered with their heads side by side, as if each head had all its blocks.",
        _BATCHED,
        "BatchedAttention._plan",
        "cache_rows = tensor(tables)[:, None] * heads + arange(heads)[:, None]",
        "cache_rows = tensor(tables)[:, :, None] * heads + arange(heads)",
    ),
    _mutant(
        "window-begins-at-its-second-block",
        "The block that a window begins in is left out, unless it begins there with the block.",
        _BATCHED,
        "BatchedAttention._plan",
        "begin = 0 if window is None else max(0, length - tokens - window + 1) // size",
        "begin = 0 if window is None else -(-max(0, length - tokens - window + 1) // size)",
    ),
    _mutant(
        "sequences-of-one-size-taken-for-the-first",
        "Sequences of similar length are taken for the first ones of the step.",
        _BATCHED,
        "BatchedAttention._plan",
        "rows = tensor(sequences)",
        "rows = slice(0, len(sequences))",
    ),
    _mutant(
        "logits-of-the-last-but-one-token",
        "A prompt's next token is chosen by the logits of its last token but one.",
        _JOINED,
        "JoinedLlama.logits",
        "residual = residual[last_rows]",
        "residual = residual[(last_rows - 1).clamp(min=0)]",
    ),
)
