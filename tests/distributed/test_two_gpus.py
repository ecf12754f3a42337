"""Ranks on two GPUs give the texts of one, and a process that lets go of them goes on."""

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
    from tests.distributed.rank_models import made
    from tests.distributed.test_sharded_models import PARAMS, PROMPTS, SIZES

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
    two = texts(partial(made, model="{model}"), tensor_parallel_size=2)
    one = texts(made("{device}", "{model}"))
    assert two == one, (two, one)
    print("alike")
"""
)
_BOTH_SUMS = (
    _TEXTS
    + """
    ways = dict(tensor_parallel_size=2, fused_model=True)
    shared = partial(texts, partial(made, model="{model}"), **ways)
    by_kernels, by_nccl = shared(exchange=True), shared(exchange=False)
    assert by_kernels == by_nccl, (by_kernels, by_nccl)
    print("alike")
"""
)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_texts_are_those_of_one_gpu(model: str) -> None:
    """One process has both engines, one behind the other; once it waited for ever."""
    code = _ONE_AND_TWO.format(device="cuda", dtype="float32", model=model)
    assert run_python(code) == "alike\n"


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_sums_by_kernels_of_ours_and_by_nccl_give_the_same_texts(model: str) -> None:
    """Both add up two numbers of 16 bits, and that has one result in either order."""
    code = _BOTH_SUMS.format(device="cuda", dtype="bfloat16", model=model)
    assert run_python(code) == "alike\n"


_STILL_HAS_IT = """
    from roseinfer import LLM
    llm = LLM("tiny", device="cuda", tensor_parallel_size=2, kv_cache_tokens=400)
    print(len(llm.generate("Once upon", progress=False)))
"""
_LETS_GO_AT_ITS_END = _STILL_HAS_IT + "    del llm\n"
_LETS_GO_OF_NCCL_AT_ITS_END = _LETS_GO_AT_ITS_END.replace("=400", "=400, exchange=False")
_CANNOT_LOAD = """
    import roseinfer.llm
    def engine(*given):
        raise MemoryError("no room")
    roseinfer.llm.Engine = engine
    roseinfer.llm.LLM("tiny", device="cuda", tensor_parallel_size=2, kv_cache_tokens=400)
"""


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (_STILL_HAS_IT, 0, "1\n"),
        (_LETS_GO_AT_ITS_END, 0, "1\n"),
        (_LETS_GO_OF_NCCL_AT_ITS_END, 0, "1\n"),
        (_CANNOT_LOAD, 1, ""),
    ],
)
def test_a_process_exits(code: str, status: int, said: str) -> None:
    """Its end waits for no other rank, which may be gone."""
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, said), done.stderr
