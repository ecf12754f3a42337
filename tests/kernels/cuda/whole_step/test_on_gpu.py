"""The kernel of a whole step on a GPU: its bits are those of the other kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import LLM, AppendPolicy, EnginePath, KVBlockManager, SamplingParams
from roseinfer.attention.backend import ResidentBatch
from roseinfer.engine.runner import SequenceRunner
from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda import whole_step as preparing
from roseinfer.kernels.cuda.toolchain import GpuProgram, compile_cached
from roseinfer.kernels.cuda.whole_step import device_unsupported_reason, source
from roseinfer.kernels.triton.norm import num_row_warps, rms_norm
from roseinfer.models.families.llama import FusedLlama
from roseinfer.models.families.whole_step import MAX_MEGAKERNEL_TOKENS, MegakernelRunner
from tests.models.families import flatten_attention, scale_weights_up

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(device_unsupported_reason(torch.device("cuda"))),
    reason="the kernel of a whole step needs a GPU with tensor maps",
)
DEVICE = "cuda"
BLOCK, NUM_BLOCKS = 64, 160
LENGTHS = [0, 1, 63, 64, 127, 128, 129, 192, 300, 1024, 4095, 4096, 5000, 8000]
OF_MANY_PARTS = range(1000, 8000, 125)
"""Lengths, so many since few sums are rounded otherwise when their parts are added up otherwise."""
SHAPES = {
    "llama-1b": ("Llama", 2048, 8192, 32, 128),
    "heads of 64": ("Llama", 2048, 8192, 32, 64),
    "narrow": ("Llama", 512, 1536, 8, 64),
    "wide": ("Llama", 4096, 14336, 32, 128),
    "biases": ("Qwen2", 1024, 4096, 16, 64),
    "norms of heads": ("Qwen3", 1024, 3072, 32, 128),
}
"""The family, the width, that of the MLP, heads and how large they are."""


def network(shape: str = "narrow", vocab: int = 5120) -> Any:
    torch.manual_seed(5)
    family, width, mlp, heads, head_dim = SHAPES[shape]
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_attention_heads": heads}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab, num_hidden_layers=3, num_key_value_heads=heads // 4, head_dim=head_dim,
        max_position_embeddings=8192, use_sliding_window=False, **sizes,
    )  # fmt: skip
    config.dtype = torch.bfloat16
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # gains and biases that are not those of every new model
                weight.add_(0.3 * torch.randn_like(weight))
    return flatten_attention(scale_weights_up(model), 8).to(torch.bfloat16)


NORM = """
#include "arithmetic.cuh"

struct Given { const u16* x; const u16* gain; u16* normed; float epsilon; };
extern "C" __global__ void norm_rows(const Given p) {
    __shared__ float squares[32];
    typedef RowNorm<WIDTH, NORM_WARPS, 256> Norm;
    long long row = (long long)blockIdx.x * WIDTH;
    float v[Norm::THREAD_ELEMENTS];
    for (int i = 0; i < Norm::THREAD_ELEMENTS; i++) {
        int n = Norm::index(threadIdx.x, i);
        v[i] = n < WIDTH ? bf16_to_float(p.x[row + n]) : 0;
    }
    float factor = Norm::factor(v, squares, threadIdx.x, p.epsilon, [] { __syncthreads(); });
    for (int i = 0; i < Norm::THREAD_ELEMENTS; i++) {
        int n = Norm::index(threadIdx.x, i);
        if (n < WIDTH) p.normed[row + n] = Norm::normed(v[i], factor, p.gain[n]);
    }
}
"""


class Given(ctypes.Structure):
    """The arguments of ``NORM``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gain", "normed")),
        ("epsilon", ctypes.c_float),
    )


@pytest.mark.parametrize("width", [192, 320, 768, 896, 1024, 1536, 2048, 3584])
def test_rows_are_normed_with_the_bits_of_other_kernels(width: int) -> None:
    """Few of many rows show that a mean is rounded otherwise, if its width is no power of two."""
    torch.manual_seed(width)
    device = torch.device(DEVICE, torch.cuda.current_device())
    text = toolchain.inline_headers(NORM, {}, "norm.cu")
    cubin = compile_cached(text, {"WIDTH": width, "NORM_WARPS": num_row_warps(width)}, device)
    program = GpuProgram(cubin, "norm_rows", 256, 0, device)
    for scale in (0.15, 1, 5):
        x = (torch.randn(20_000, width, device=device) * scale).bfloat16()
        gain = (1 + 0.1 * torch.randn(width, device=device)).bfloat16()
        normed = torch.empty_like(x)
        program.launch(Given(x.data_ptr(), gain.data_ptr(), normed.data_ptr(), 1e-6), len(x))
        assert torch.equal(normed, rms_norm(x, gain, 1e-6))


class Steps:
    """One sequence of random tokens, whose step is computed in one kernel or in several."""

    def __init__(self, shape: str) -> None:
        self.model = FusedLlama(network(shape, 5003))
        own = self.model.shape
        self.kv = KVBlockManager(
            own.num_layers, own.num_kv_heads, own.head_dim, BLOCK, NUM_BLOCKS, DEVICE,
            torch.bfloat16, AppendPolicy(triton=False), layers_per_group=own.num_layers,
        )  # fmt: skip
        self.attention = SequenceRunner(self.model, self.kv, attention="triton").attention
        self.tables = torch.zeros((1, NUM_BLOCKS), dtype=torch.int64, device=DEVICE)
        self.tables[0, : NUM_BLOCKS - 1] = torch.randperm(NUM_BLOCKS - 1, device=DEVICE) + 1
        self.token = torch.tensor([77], device=DEVICE)
        self.length = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def begin(self, length: int) -> None:
        """Fill what is stored with numbers, and all else with NaN."""
        torch.manual_seed(length)
        for cache in (self.kv.keys, self.kv.values):
            cache.normal_()
            held = length // BLOCK
            cache[:, self.tables[0, held], :, length % BLOCK :] = float("nan")
            cache[:, self.tables[0, held + 1 :]] = float("nan")
        self.length.fill_(length)

    @torch.inference_mode()
    def step(self, *, whole: bool) -> Tensor:
        self.model.max_megakernel_tokens = MAX_MEGAKERNEL_TOKENS if whole else 0
        self.attention.prepare(ResidentBatch([self.tables], self.length))
        before = self.attention.path_counts[EnginePath.MEGAKERNEL]
        logits = self.model.logits(self.token, self.length, None, self.attention)
        assert self.attention.path_counts[EnginePath.MEGAKERNEL] == before + whole
        return logits.clone()

    def stored(self) -> Tensor:
        return torch.stack([self.kv.keys, self.kv.values]).view(torch.int16).clone()


@pytest.fixture(scope="module", params=SHAPES)
def steps(request: pytest.FixtureRequest) -> Steps:
    return Steps(request.param)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_and_caches_are_nearly_those_of_several_kernels(steps: Steps, length: int) -> None:
    steps.begin(length)
    want, there = steps.step(whole=False).float(), steps.stored()
    steps.begin(length)
    got, stored = steps.step(whole=True).float(), steps.stored()
    assert not got.isnan().any()
    assert float((got - want).norm() / want.norm()) < 0.02
    near, wanted = (each.view(torch.bfloat16).nan_to_num(9.0).float() for each in (stored, there))
    assert float((near - wanted).abs().max()) < 0.25
    assert int((stored != there).sum()) <= 2 * 3 * stored.shape[3] * stored.shape[5]


def differs(steps: Steps, length: int) -> bool:
    steps.begin(length)
    want, there = steps.step(whole=False), steps.stored()
    steps.begin(length)
    got, stored = steps.step(whole=True), steps.stored()
    return not (torch.equal(stored, there) and torch.equal(got, want))


@pytest.mark.parametrize("length", LENGTHS)
def test_bits_are_those_of_several_kernels(steps: Steps, length: int) -> None:
    assert not differs(steps, length)


def test_bits_of_many_parts_are_those_of_several_kernels(steps: Steps) -> None:
    assert not [length for length in OF_MANY_PARTS if differs(steps, length)]


def test_another_order_of_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial that a model is put to when it is loaded, which may find it too, is left out."""
    text = source()
    for own, other in (
        (
            "for (int j = 0; j < batch; j++) {\n",
            "for (int i = 0, j; j = batch - 1 - i, i < batch; i++) {\n",
        ),
        ("if (begin + j == 0)", "if (begin + i == 0)"),
    ):
        assert text.count(own) == 1
        text = text.replace(own, other)
    monkeypatch.setattr(preparing, "source", lambda *_: text)
    monkeypatch.setattr(MegakernelRunner, "_is_bit_identical", lambda *_: True)
    steps = Steps("norms of heads")
    assert any(differs(steps, length) for length in OF_MANY_PARTS)


def test_replayed_from_a_graph(steps: Steps) -> None:
    """Lengths come from the device, and every launch leaves the counters for the next one."""
    steps.begin(70)
    steps.step(whole=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = steps.step(whole=True)
    for length in (70, 3, 1500, 70):
        steps.begin(length)
        want = steps.step(whole=True)
        for _ in range(20):
            graph.replay()
        assert torch.equal(logits, want)


PROMPTS = [[7, 3, 90, 12, 5, 44, 2] * 9, [7, 3, 90], list(range(20, 41))]


def engine(model: Any, **settings: Any) -> LLM:
    return LLM(model, device=DEVICE, block_size=16, **settings)


def texts(llm: LLM, prompts: list[list[int]], *news: int) -> list[list[int]]:
    params = [SamplingParams(max_new_tokens=new, ignore_eos=True) for new in news]
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture
def in_several_kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have no step computed in one kernel, until that is undone."""
    monkeypatch.setattr(MegakernelRunner, "logits", lambda *_: None)
    return monkeypatch


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_engine_alone_and_two_at_a_time(
    in_several_kernels: pytest.MonkeyPatch, *, batch_invariant: bool
) -> None:
    """Steps of one sequence are one kernel whether or not another engine has such a kernel."""
    settings: dict[str, Any] = {"batch_invariant": batch_invariant, "kv_cache_tokens": 4096}
    several = engine(network(), **settings)
    wanted = [texts(several, [prompt], 80) for prompt in PROMPTS]
    assert not several.engine.path_counts[EnginePath.MEGAKERNEL]
    in_several_kernels.undo()
    engines = [engine(network(), **settings) for _ in range(2)]
    for prompt, want in zip(PROMPTS, wanted, strict=True):
        for llm in engines:
            assert texts(llm, [prompt], 80) == want
    for llm in engines:
        assert llm.engine.path_counts[EnginePath.MEGAKERNEL] > 200


def test_after_others_have_left_and_after_a_preemption(
    in_several_kernels: pytest.MonkeyPatch,
) -> None:
    """Some end long before others, and blocks are too few for all."""
    few: dict[str, Any] = {"kv_cache_tokens": 224, "max_batch_size": 3, "batch_invariant": True}
    wanted = texts(engine(network(), **few), PROMPTS, 100, 10, 90)
    in_several_kernels.undo()
    llm = engine(network(), **few)
    assert texts(llm, PROMPTS, 100, 10, 90) == wanted
    assert llm.engine.path_counts[EnginePath.MEGAKERNEL]
    assert llm.engine.path_counts[EnginePath.RECOMPUTED]


def test_a_sequence_that_grows_too_long_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last steps are several kernels, and its text is the same."""
    settings: dict[str, Any] = {"batch_invariant": True, "kv_cache_tokens": 4096}
    whole = engine(network(), **settings)
    wanted = texts(whole, [PROMPTS[0]], 80)
    monkeypatch.setattr(FusedLlama, "max_megakernel_tokens", len(PROMPTS[0]) + 30)
    llm = engine(network(), **settings)
    assert texts(llm, [PROMPTS[0]], 80) == wanted
    counts = llm.engine.path_counts
    assert whole.engine.path_counts[EnginePath.MEGAKERNEL] > 75
    assert 30 <= counts[EnginePath.MEGAKERNEL] < 40
    assert counts[EnginePath.RESIDENT] == whole.engine.path_counts[EnginePath.RESIDENT]
