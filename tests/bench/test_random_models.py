"""Models with random weights, and the bytes that a step reads of them."""

from __future__ import annotations

import pytest
import torch

from roseinfer import LLM, ConfigError, SamplingParams
from roseinfer.bench import cases
from roseinfer.bench.cases import architecture
from roseinfer.bench.driver import MemoryFloor, count_weights_read, memory_floor
from roseinfer.bench.model_source import ModelSource, random_model
from roseinfer.models.families import fused_family

_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}
_PYTHIA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 1000,
}  # fmt: skip
_LLAMA = {**_PYTHIA, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512}
_SMALLER = {"gpt2": _GPT2, "pythia-410m": _PYTHIA}
"""Fewer and narrower layers; architectures without an entry use those of Llama."""


@pytest.fixture(params=cases.ARCHITECTURES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    architectures = cases.ARCHITECTURES
    own, smaller = architectures[request.param], _SMALLER.get(request.param, _LLAMA)
    monkeypatch.setitem(architectures, request.param, own._replace(sizes=own.sizes | smaller))
    return str(request.param)


def test_weights_are_reproducible_and_the_random_state_is_kept(name: str) -> None:
    before = torch.random.get_rng_state()
    first, second = (random_model(name, "cpu", None) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in weights)
    assert first.dtype is torch.float32
    assert not first.training


def test_argmax_has_a_margin(name: str) -> None:
    model = random_model(name, "cpu", None)
    with torch.no_grad():
        logits = model(torch.arange(40)[None] * 7).logits[0]
    top_two = logits.topk(2).values
    assert float((top_two[:, 0] - top_two[:, 1]).median()) > 1.0


def test_every_token_has_a_text(name: str) -> None:
    """Prompts are bytes, but generated tokens come from the whole vocabulary."""
    llm = ModelSource(name, random_weights=True, device="cpu", dtype=None).llm({})
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=3, temperature=50.0)
    (output,) = llm.generate("Hello", params)
    assert llm.tokenizer.encode("Hello") == list(b"Hello")
    assert max(output.token_ids) > 256
    assert output.text is not None
    beyond_bytes = next(token for token in output.token_ids if token > 256)
    assert f"<{beyond_bytes}>" in output.text


def test_eos_token_is_that_of_the_architecture(name: str) -> None:
    llm = ModelSource(name, random_weights=True, device="cpu", dtype="bfloat16").llm({})
    assert llm.tokenizer.eos_token_id == architecture(name).eos_token_id
    assert llm.engine.sequence_runner.model.dtype is torch.bfloat16


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown architecture 'gpt5'; use one of gpt2, llama-1b, "
    ):
        random_model("gpt5", "cpu", None)


def test_weights_read_match_the_named_models() -> None:
    """GPT-2's position embeddings are not read; its token embeddings are, as the output layer."""
    gpt2 = ModelSource("gpt2", random_weights=True, device=None, dtype=None).skeleton()
    assert next(gpt2.parameters()).device.type == "meta"
    assert count_weights_read(gpt2) == 124_439_808 - 1024 * 768
    llama = ModelSource("llama-1b", random_weights=True, device=None, dtype=None).skeleton()
    layer = 2048 * (32 + 8 + 8 + 32) * 128 + 3 * 2048 * 8192 + 2 * 2048
    assert count_weights_read(llama) == 128256 * 2048 + 16 * layer + 2048


@pytest.mark.parametrize(
    ("name", "million"),
    [("qwen3-0.6b", 596), ("olmo2-1b", 1485), ("olmoe-1b-7b", 6919), ("pythia-410m", 405)],
)
def test_parameter_counts_match_the_named_models(name: str, million: int) -> None:
    network = ModelSource(name, random_weights=True, device=None, dtype=None).skeleton()
    assert round(sum(weight.numel() for weight in network.parameters()) / 1e6) == million


def test_experts_that_one_row_does_not_use_are_not_read() -> None:
    olmoe = ModelSource("olmoe-1b-7b", random_weights=True, device=None, dtype=None).skeleton()
    layer = 4 * 2048 * 2048 + 64 * 2048 + 8 * 3 * 2048 * 1024 + 4 * 2048
    assert count_weights_read(olmoe) == 50304 * 2048 + 16 * layer + 2048


@pytest.mark.parametrize("name", cases.ARCHITECTURES)
def test_all_architectures_but_pythia_have_fused_kernels(name: str) -> None:
    network = ModelSource(name, random_weights=True, device=None, dtype=None).skeleton()
    assert (fused_family(network.bfloat16()) is None) == (name == "pythia-410m")


def test_untied_token_embeddings_are_not_read() -> None:
    tiny = ModelSource("tiny", random_weights=False, device=None, dtype=None).skeleton()
    everything = sum(weight.numel() for weight in tiny.parameters())
    assert count_weights_read(tiny) == everything - (257 + 1024) * 64


def test_floor_is_bytes_by_bandwidth() -> None:
    floor = memory_floor(
        ModelSource("tiny", random_weights=False, device="cpu", dtype=None).skeleton(),
        LLM("tiny", device="cpu"),
    )
    assert floor.token_bytes == 2 * 2 * 64 * 4  # keys and values, layers, width, float32
    assert floor.bandwidth > 1e8
    small_floor = MemoryFloor(weight_bytes=100, token_bytes=3, bandwidth=50.0)
    assert small_floor.seconds(2, 7) == (2 * 100 + 7 * 3) / 50.0
