"""Attention of prompts by warpgroups has the bits of the chunk kernel, on a GPU that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, AttentionPath, SamplingParams
from roseinfer.attention.triton import TritonAttention
from roseinfer.kernels.cuda import prefill_attention
from roseinfer.kernels.cuda.prefill_attention import KERNEL
from roseinfer.kernels.cuda.tensor_maps import supports_wgmma
from roseinfer.kernels.triton.prefill_attention import paged_attention_chunks
from roseinfer.kernels.triton.rope import rotate
from tests.kernels.cuda.warpgroups.prompts import TOLERANCE, Attention, Prompts
from tests.kernels.cuda.warpgroups.test_prompts_emulated import CASES
from tests.models.fused.same_bits import model_of

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports_wgmma(torch.device("cuda"), torch.bfloat16),
    reason="only GPUs of compute capability 9 have warpgroups",
)
LONG = {
    "parts of two sizes": Prompts([(4000, 300), (5000, 40)], dim=128),
    "more items than programs": Prompts([(0, 900)] * 8, kv_heads=4, group=4, dim=128),
    "heads of 64": Prompts([(0, 2500)], kv_heads=3, group=1),
    "seven heads": Prompts([(10, 300)], group=7, dim=128),
}


def by_triton(attention: Attention) -> Tensor:
    tokens = max(1, 64 >> (attention.prompts.group - 1).bit_length())
    longest = max(before + new for before, new in attention.prompts.sequences)
    query = attention.query.clone()
    if attention.rotation:
        rotate(query, None, attention.positions, attention.rotation)
    given = query, attention.k_cache, attention.v_cache, attention.tables
    tiles = attention.tiles(tokens)
    return paged_attention_chunks(*given, tiles, attention.traits, tile_q=tokens, longest=longest)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("sharp", [1.0, 6.0])
@pytest.mark.parametrize("case", [*CASES, *LONG])
def test_bits_of_attention(case: str, sharp: float, rotates: bool) -> None:
    attention = Attention({**CASES, **LONG}[case], "cuda", sharp=sharp, rotates=rotates)
    got = attention.computed()
    assert torch.equal(got, by_triton(attention))
    assert float((got.double().cpu() - attention.expected()).abs().max()) < TOLERANCE * sharp


def test_the_kernel_is_there_for_all_sizes() -> None:
    device = torch.device("cuda", 0)
    assert all(KERNEL.load(each.sizes, device) for each in [*CASES.values(), *LONG.values()])


def test_texts_and_their_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "_MIN_TILES", 0)  # these contexts are short
    prompts = [[7, 3, 90], [12] * 70, list(range(2, 400)), list(range(2, 380)), [5, 6, 7, 8]]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=True)
    settings: dict[str, Any] = {
        "device": "cuda",
        "max_length": 512,
        "kv_cache_tokens": 4096,
        "prefill_max_tokens": 300,
    }

    def told() -> Any:
        llm = LLM(model_of("llama"), **settings)
        return llm, [(each.token_ids, each.logprobs) for each in llm.generate(prompts, params)]

    llm, got = told()
    assert (
        llm.engine.path_counts[AttentionPath.PREFILL_CUDA] >= 4
    )  # two steps, and the last layer not
    began = TritonAttention.__init__

    def without(self: TritonAttention, *given: Any) -> None:
        began(self, *given)
        self._kernels = replace(self._kernels, prefill_tile_tokens=lambda *_, **__: 0)

    monkeypatch.setattr(TritonAttention, "__init__", without)
    llm, want = told()
    assert not llm.engine.path_counts[AttentionPath.PREFILL_CUDA]
    assert got == want
