"""Models whose completions repeat themselves."""

from __future__ import annotations

from typing import Any

from roseinfer import LLM, EnginePath, tiny_gpt2
from roseinfer.bench.speculation import make_repetitive


def repeating_llm(device: str, **config: Any) -> LLM:
    """Build an engine whose completions are periodic. Its cache is full of NaN."""
    model = make_repetitive(tiny_gpt2(device).model)
    llm = LLM(model, device=device, dtype="float32", **({"block_size": 4} | config))
    kv = llm.engine.sequence_runner.kv
    for cache in (kv.keys, kv.values):
        cache.fill_(float("nan"))
    return llm


def draft_counts(llm: LLM) -> tuple[int, int, int]:
    """Return the numbers of drafts, of accepted ones and of rejected ones."""
    counts = llm.engine.path_counts
    paths = (EnginePath.DRAFTED, EnginePath.ACCEPTED, EnginePath.REJECTED)
    drafts, accepted, rejected = [counts[path] for path in paths]
    assert drafts == accepted + rejected
    return drafts, accepted, rejected
