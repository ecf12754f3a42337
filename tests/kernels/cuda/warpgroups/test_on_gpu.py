"""Products that stream have the bits of Triton's kernels, on a GPU that has warpgroups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.kernels.cuda import streamed as cuda_streamed
from roseinfer.kernels.cuda.streamed import KERNEL, can_stream_gemm
from roseinfer.kernels.cuda.tensor_maps import supports_wgmma
from roseinfer.kernels.triton import linear, streamed
from tests.kernels.cuda.warpgroups.products import SHAPES, Product, Shape, kinds
from tests.models.fused.same_bits import model_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports_wgmma(torch.device("cuda"), torch.bfloat16),
    reason="only GPUs of compute capability 9 have warpgroups",
)


@pytest.fixture
def in_tritons_kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have no product streamed, until that is undone."""
    for module in (streamed, streamed, linear):
        monkeypatch.setattr(module, "can_stream_gemm", lambda *_: False)
    return monkeypatch


def test_the_kernel_is_there_for_all_numbers_of_rows() -> None:
    assert all(KERNEL.load(tiles, torch.device("cuda", 0)) for tiles in kinds())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("kind", SHAPES)
def test_bits_of_products(
    in_tritons_kernels: pytest.MonkeyPatch, kind: str, rows: int, wide: bool
) -> None:
    in_tritons_kernels.setattr(cuda_streamed, "_MIN_WIDE_PROGRAMS", 1 if wide else 1 << 30)
    product = Product(SHAPES[kind], rows, "cuda")
    shape = product.shape
    assert can_stream_gemm(product.x, product.weight, shape.parts, shape.strips)
    want = torch.empty_like(product.room[:, :rows])
    if shape.strips == 2:
        want[0] = streamed.stream_gate_up(product.x, product.weight)
    else:
        streamed._launch(product.x, product.weight, product.bias, want)
    assert torch.equal(product.computed(), want)
    assert not product.spoilt()


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
def test_bits_of_a_layer_in_parts(in_tritons_kernels: pytest.MonkeyPatch, rows: int) -> None:
    product = Product(Shape(768, 192, parts=3), rows, "cuda")
    want = linear.split_k_linear(product.x, product.weight.T, 3)
    in_tritons_kernels.undo()
    assert can_stream_gemm(product.x, product.weight, 3, 1)
    assert torch.equal(linear.split_k_linear(product.x, product.weight.T, 3), want)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_texts_and_their_log_probabilities(
    in_tritons_kernels: pytest.MonkeyPatch, family: str
) -> None:
    prompts = [[7, 3, 90], [12] * 70, [5, 6, 7, 8], list(range(2, 40))]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, logprobs=True)
    settings: dict[str, Any] = {"device": "cuda", "max_length": 512, "kv_cache_tokens": 4096}

    def told() -> Any:
        llm = LLM(model_of(family), **settings)
        return llm, [(each.token_ids, each.logprobs) for each in llm.generate(prompts, params)]

    _, want = told()
    in_tritons_kernels.undo()
    llm, got = told()
    assert got == want
    assert llm.engine.path_counts[EnginePath.STREAMING_GEMM] > 50
