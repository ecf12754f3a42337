"""roseinfer's own decode step for the timing gate, in its own process and of any revision.

Other revisions run this file with their own engine, so it uses nothing newer than they have.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from roseinfer import LLM, AppendPolicy, SamplingParams, tiny_gpt2

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROMPT, _TOKENS = 224, 64
"""Prompt and completion length of a request. All requests are submitted again when they end.

Contexts stay about 256 tokens long, so that every step costs the same.
"""


def decode() -> dict[str, Any]:
    """Return a step of 64 requests to a GPT-2 of 124M, or of 8 to a tiny one without a GPU."""
    return _on_gpu() if torch.cuda.is_available() else _on_cpu()


def _on_cpu() -> dict[str, Any]:
    torch.set_num_threads(1)
    tiny = tiny_gpt2()
    llm = LLM(
        tiny.model,
        tokenizer=tiny.tokenizer,
        prefix_cache=False,
        paged_attention=False,  # here the kernels are only interpreted
        append_policy=AppendPolicy(triton=False),
    )
    return _target(llm, requests=8)


def _on_gpu() -> dict[str, Any]:
    from roseinfer.bench.model_source import ModelSource

    source = ModelSource("gpt2", random_weights=True, device=None, dtype=None)
    llm = source.llm({"prefix_cache": False})
    target = _target(llm, requests=64)
    if importlib.util.find_spec("roseinfer.bench.driver"):
        from roseinfer.bench.driver import memory_floor

        stored = 64 * (_PROMPT + _TOKENS // 2)
        target["floor_seconds"] = memory_floor(source.skeleton(), llm).seconds(1, stored)
    return target


def _target(llm: LLM, requests: int) -> dict[str, Any]:
    engine = llm.engine
    params = SamplingParams(temperature=0, max_new_tokens=_TOKENS, ignore_eos=True)

    def step() -> None:
        if not engine.has_work:
            for first in range(requests):
                engine.submit([1 + (first + at) % 90 for at in range(_PROMPT)], params)
        engine.step()

    def path_counts() -> Mapping[str, int]:
        counts = Counter(engine.path_counts) + Counter(engine.sequence_runner.kv.path_counts)
        return {str(getattr(path, "value", path)): count for path, count in counts.items()}

    return {"step": step, "tokens": requests, "path_counts": path_counts}
