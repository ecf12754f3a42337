"""Ranks on two GPUs give the texts of one, and a process that lets go of them goes on."""

from __future__ import annotations

import pytest
import torch

from tests.python_process import run_python

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

_TEXTS = """
    import gc
    from functools import partial
    from roseinfer import LLM
    from tests.parallel.made import made
    from tests.parallel.test_shares import PARAMS, PROMPTS, SIZES

    sizes = SIZES | dict(device="{device}", dtype="{dtype}", block_size=16, kv_cache_tokens=480)

    def texts(model, **ways):
        llm = LLM(model, **sizes, **ways)
        found = [each.token_ids for each in llm.generate(PROMPTS, PARAMS, progress=False)]
        del llm
        gc.collect()
        return found
"""
_ONE_AND_TWO = (
    _TEXTS
    + """
    for model in ("gpt2", "llama"):
        two = texts(partial(made, model=model), tensor_parallel_size=2)
        assert two == texts(made("{device}", model)), (model, two)
    print("alike")
"""
)
_BOTH_SUMS = (
    _TEXTS
    + """
    for model in ("gpt2", "llama"):
        ways = dict(tensor_parallel_size=2, fused_model=True)
        shared = partial(texts, partial(made, model=model), **ways)
        by_kernels, by_nccl = shared(exchange=True), shared(exchange=False)
        assert by_kernels == by_nccl, (model, by_kernels, by_nccl)
    print("alike")
"""
)


def test_texts_are_those_of_one_gpu() -> None:
    """One process has all four engines, one behind the other; once it waited for ever."""
    assert run_python(_ONE_AND_TWO.format(device="cuda", dtype="float32")) == "alike\n"


def test_sums_by_kernels_of_ours_and_by_nccl_give_the_same_texts() -> None:
    """Both add up two numbers of 16 bits, and that has one result in either order."""
    assert run_python(_BOTH_SUMS.format(device="cuda", dtype="bfloat16")) == "alike\n"
