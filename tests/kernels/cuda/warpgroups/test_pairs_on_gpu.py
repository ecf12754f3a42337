"""Products by pairs of programs have the bits of others, on a GPU that has warpgroups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.kernels.cuda import paired as paired_products
from roseinfer.kernels.cuda.tensor_maps import supports_wgmma
from roseinfer.kernels.triton.linear import split_k_matmul
from roseinfer.kernels.triton.norm import add_rms_norm, rms_norm
from roseinfer.kernels.triton.streamed import silu_and_mul, stream_linear_split_k
from roseinfer.models.families import layers
from tests.kernels.cuda.warpgroups.pairs import SHAPES, TOLERANCE, Paired, Shape, off
from tests.models.fused.same_bits import model_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports_wgmma(torch.device("cuda"), torch.bfloat16),
    reason="only GPUs of compute capability 9 have warpgroups",
)
LARGE = {
    "a prompt": Shape(1024, 2048, 2048, parts=4),
    "many rows": Shape(8000, 8192, 2048, parts=4, times=0.22),
    "rows that fill no pair": Shape(1153, 4096, 1024, parts=8),
    "gates of a prompt": Shape(1100, 2048, 8192, gates=True),
    "gates of Qwen3": Shape(2048, 1024, 3072, gates=True),
}


@pytest.mark.parametrize("kind", LARGE)
def test_bits_of_products(kind: str) -> None:
    paired = Paired(LARGE[kind], "cuda")
    x, weight, shape = paired.x, paired.weight, paired.shape
    for _ in range(3):
        paired.room.copy_(paired.before)
        got = paired.computed()
        if shape.gates:
            want = silu_and_mul(x @ weight.T)
        else:
            parts = split_k_matmul(x.contiguous(), weight.T, shape.parts)
            gain = torch.ones_like(weight[:, 0])
            want = paired.before[: shape.rows, : shape.outputs].contiguous()
            normed = add_rms_norm(want, parts, gain, 1e-5, shape.times)
            assert torch.equal(rms_norm(got, gain, 1e-5), normed)
        assert torch.equal(got, want)
        assert not paired.spoilt()


@pytest.mark.parametrize("kind", SHAPES)
def test_products(kind: str) -> None:
    paired = Paired(SHAPES[kind], "cuda")
    assert off(paired.computed(), paired.expected()) < TOLERANCE
    assert not paired.spoilt()


def test_a_row_has_the_bits_that_it_has_among_few() -> None:
    paired = Paired(Shape(1024, 2048, 2048, parts=4), "cuda")
    few = paired.before[:1024, :2048].contiguous()[:5]
    parts = stream_linear_split_k(paired.x[:5].contiguous(), paired.weight)
    assert len(parts) == 4
    add_rms_norm(few, parts, torch.ones_like(few[0]), 1e-5)
    assert torch.equal(paired.computed()[:5], few)


def test_texts_and_their_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired_products, "_MIN_TILES", 1)  # these layers are small
    prompts = [[7, 3, 90], [12] * 70, list(range(2, 400)), list(range(2, 380)), [5, 6, 7, 8]]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=True)
    settings: dict[str, Any] = {"device": "cuda", "max_length": 512, "kv_cache_tokens": 4096}

    def told() -> Any:
        llm = LLM(model_of("llama"), **settings)
        return llm, [(each.token_ids, each.logprobs) for each in llm.generate(prompts, params)]

    llm, got = told()
    assert llm.engine.path_counts[EnginePath.PAIRED_GEMM]
    monkeypatch.setattr(layers, "can_add_paired_gemm", lambda *_: False)
    for module in (layers, layers):
        monkeypatch.setattr(module, "can_pair_gate_up", lambda *_: False)
    llm, want = told()
    assert not llm.engine.path_counts[EnginePath.PAIRED_GEMM]
    assert got == want
