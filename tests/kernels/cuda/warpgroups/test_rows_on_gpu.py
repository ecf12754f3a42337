"""Attention of rows by its own kernel has the bits of Triton's, on a GPU that has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from roseinfer import LLM, AttentionPath, SamplingParams
from roseinfer.attention.triton import TritonAttention
from roseinfer.kernels.cuda.decode_attention import KERNEL
from roseinfer.kernels.cuda.tensor_maps import supports_wgmma
from roseinfer.kernels.triton.decode_attention import append_and_attend
from tests.kernels.cuda.warpgroups.prompts import TOLERANCE
from tests.kernels.cuda.warpgroups.rows import Rows, same_bits
from tests.kernels.cuda.warpgroups.test_rows_emulated import CASES, WAYS
from tests.models.fused.same_bits import model_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports_wgmma(torch.device("cuda"), torch.bfloat16),
    reason="only GPUs of compute capability 9 have the kernel",
)
MORE: dict[str, tuple[list[int], dict[str, Any]]] = {
    "parts of two sizes": ([4095, 4096, 4097, 9000, 513], {"group": 4, "dim": 128}),
    "rows in turn": ([100 + at for at in range(90)], {"kv_heads": 8, "dim": 128}),
}


def ways_of(rows: Rows) -> list[tuple[int, int]]:
    """Return those that a multiprocessor has room for."""
    room = torch.cuda.get_device_properties("cuda").shared_memory_per_multiprocessor - 1024
    return [way for way in WAYS if rows.sizes(*way).shared_bytes <= room]


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("sharp", [1.0, 6.0])
@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_bits_of_attention(case: str, sharp: float, rotates: bool) -> None:
    lengths, heads = {**CASES, **MORE}[case]
    rows = Rows(lengths, "cuda", sharp=sharp, rotates=rotates, **heads)
    caches = rows.attention.k_cache.clone(), rows.attention.v_cache.clone()
    given = *rows.heads, *caches, *rows.told
    want = append_and_attend(*given)
    for way in ways_of(rows):
        rows = Rows(lengths, "cuda", sharp=sharp, rotates=rotates, **heads)
        got = rows.computed(rows.sizes(*way))
        assert torch.equal(got, want)
        assert all(map(same_bits, rows.caches, caches))
    off = (got.double().cpu() - rows.attention.expected()).abs().max()
    assert float(off) < TOLERANCE * sharp


def test_the_kernel_is_there_for_all_sizes() -> None:
    device = torch.device("cuda", 0)
    for lengths, heads in [*CASES.values(), *MORE.values()]:
        rows = Rows(lengths[:1], **heads)
        assert all(KERNEL.load(rows.sizes(*way), device) for way in ways_of(rows))


def test_texts_and_their_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[7, 3, 90 + at % 50] * (1 + at * 3) for at in range(40)]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=True)
    settings: dict[str, Any] = {"device": "cuda", "max_length": 512, "kv_cache_tokens": 16384}

    def told() -> Any:
        llm = LLM(model_of("llama"), max_batch_size=40, **settings)
        return llm, [(each.token_ids, each.logprobs) for each in llm.generate(prompts, params)]

    llm, got = told()
    assert llm.engine.path_counts[AttentionPath.APPEND_AND_ATTEND_CUDA]
    began = TritonAttention.__init__

    def without(self: TritonAttention, *given: Any) -> None:
        began(self, *given)
        self._kernels = replace(self._kernels, can_attend_rows=lambda *_: False)

    monkeypatch.setattr(TritonAttention, "__init__", without)
    llm, want = told()
    assert not llm.engine.path_counts[AttentionPath.APPEND_AND_ATTEND_CUDA]
    assert got == want
