"""Ranks on two GPUs: the same tokens as one GPU, and clean exits."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest
import torch

from tests.python_process import ROOT, run_python

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

_TEXTS = """
    import gc
    from functools import partial
    from roseinfer import LLM
    from tests.distributed.rank_models import build_on
    from tests.distributed.test_sharded_models import PARAMS, PROMPTS, SIZES

    sizes = SIZES | dict(device="{device}", dtype="{dtype}", block_size=16, kv_cache_tokens=480)

    def texts(model, **ways):
        llm = LLM(model, **sizes, **ways)
        token_ids = [each.token_ids for each in llm.generate(PROMPTS, PARAMS, progress=False)]
        del llm
        gc.collect()
        return token_ids
"""
_ONE_AND_TWO = (
    _TEXTS
    + """
    two = texts(partial(build_on, model="{model}"), tensor_parallel_size=2)
    one = texts(build_on("{device}", "{model}"))
    assert two == one, (two, one)
    print("equal")
"""
)
_BOTH_SUMS = (
    _TEXTS
    + """
    ways = dict(tensor_parallel_size=2, fused_model=True)
    shared = partial(texts, partial(build_on, model="{model}"), **ways)
    by_kernels, by_nccl = shared(exchange=True), shared(exchange=False)
    assert by_kernels == by_nccl, (by_kernels, by_nccl)
    print("equal")
"""
)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_completions_match_one_gpu(model: str) -> None:
    """One process runs both engines, one after the other."""
    code = _ONE_AND_TWO.format(device="cuda", dtype="float32", model=model)
    assert run_python(code) == "equal\n"


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_fused_all_reduce_and_nccl_give_the_same_tokens(model: str) -> None:
    """Both add two 16-bit numbers, and that has one result in either order."""
    code = _BOTH_SUMS.format(device="cuda", dtype="bfloat16", model=model)
    assert run_python(code) == "equal\n"


_KEEP_RANKS = """
    from roseinfer import LLM
    llm = LLM("tiny", device="cuda", tensor_parallel_size=2, kv_cache_tokens=400)
    print(len(llm.generate("Once upon", progress=False)))
"""
_DROP_RANKS = _KEEP_RANKS + "    del llm\n"
_DROP_NCCL_RANKS = _DROP_RANKS.replace("=400", "=400, exchange=False")
_CANNOT_LOAD = """
    import roseinfer.llm
    def engine(*args):
        raise MemoryError("no room")
    roseinfer.llm.Engine = engine
    roseinfer.llm.LLM("tiny", device="cuda", tensor_parallel_size=2, kv_cache_tokens=400)
"""


@pytest.mark.parametrize(
    ("code", "status", "stdout"),
    [
        (_KEEP_RANKS, 0, "1\n"),
        (_DROP_RANKS, 0, "1\n"),
        (_DROP_NCCL_RANKS, 0, "1\n"),
        (_CANNOT_LOAD, 1, ""),
    ],
)
def test_process_with_ranks_exits(code: str, status: int, stdout: str) -> None:
    """Exit waits for no other rank, which may be gone."""
    command = [sys.executable, "-c", dedent(code)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (status, stdout), process.stderr
