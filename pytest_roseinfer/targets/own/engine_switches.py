"""The engine's switches, and those that change the sizes of what it allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.targets.own import model_shapes as shapes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RUN_AHEAD = (0, 1, 3)
OPTION_CHOICES: Mapping[str, Sequence[Any]] = {
    "model": (
        *("gpt2", "llama", "llama 10:2", "llama 24:3", "llama 32:2", shapes.SLOPED),
        *shapes.WINDOWED,
    ),
    "prefix_cache": (True, False),
    "prefill_admission_policy": ("fifo", "pack"),
    "prefill_max_tokens": (100, 1, 3, 8),
    "prefill_max_batch_size": (8, 1, 2),
    "prompt_rows": (0, 5, 30),
    "max_batch_size": (8, 1, 2, 3, 40),
    "chunked_prefill": (True, False),
    "per_layer_kv": (False, True),
    "resident_decode": (False, True),
    "run_ahead": RUN_AHEAD,
    "speculation": (None, None, "ngram"),
    # Under Triton's interpreter a step takes a hundred times as long, so only where aimed at.
    "paged_attention": (False,),
    "fused_model": (False,),
    "pad_head": (False,),
    # Capturing takes seconds, so only where aimed at.
    "cuda_graph": (False,),
}
SIZES: Mapping[str, Sequence[Any]] = {
    "model": shapes.OF_MANY_SHAPES,
    "max_batch_size": (8, 1, 17, 3, 64, 128),
    "prefill_max_tokens": (2048, 16, 100, 333),
    "prefill_max_batch_size": (16, 1, 128),
    "prompt_rows": (0, 64),
    "run_ahead": RUN_AHEAD,
    "speculation": (None, "ngram"),
    "resident_decode": (True, True, False),
    "cuda_graph": (False, True),
    "paged_attention": (True, True, False),
    "fused_model": (True, False),
    "pad_head": (True, False),
    "prefix_cache": (True, False),
    "chunked_prefill": (True, False),
}
