"""Models whose texts repeat themselves."""

from __future__ import annotations

from typing import Any

from roseinfer import LLM, EnginePath, tiny_gpt2
from roseinfer.bench.speculation import make_repetitive


def repeating_llm(device: str, **config: Any) -> LLM:
    """An engine whose cache is full of NaN. Its texts go round in circles."""
    model = make_repetitive(tiny_gpt2(device).model)
    llm = LLM(model, device=device, dtype="float32", **({"block_size": 4} | config))
    kv = llm.engine.sequence_runner.kv
    for cache in (kv.keys, kv.values):
        cache.fill_(float("nan"))
    return llm


def drafted(llm: LLM) -> tuple[int, int, int]:
    """Return how many drafts there were, how many were accepted, and how many not."""
    counts = llm.engine.path_counts
    paths = (EnginePath.DRAFTED, EnginePath.ACCEPTED, EnginePath.REJECTED)
    drafts, accepted, refused = [counts[path] for path in paths]
    assert drafts == accepted + refused
    return drafts, accepted, refused
