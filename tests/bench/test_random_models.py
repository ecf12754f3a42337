"""Models with random weights, and the least that a step must read of them."""

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
"""Fewer and narrower layers, of all others those of Llama."""


@pytest.fixture(params=cases.ARCHITECTURES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    known = cases.ARCHITECTURES
    own, fewer = known[request.param], _SMALLER.get(request.param, _LLAMA)
    monkeypatch.setitem(known, request.param, own._replace(sizes=own.sizes | fewer))
    return str(request.param)


def test_weights_are_always_the_same_and_chance_is_left_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first, second = (random_model(name, "cpu", None) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in weights)
    assert first.dtype is torch.float32
    assert not first.training


def test_the_likeliest_token_stands_out(name: str) -> None:
    model = random_model(name, "cpu", None)
    with torch.no_grad():
        logits = model(torch.arange(40)[None] * 7).logits[0]
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).median()) > 1.0


def test_any_token_of_the_model_can_be_read(name: str) -> None:
    """Prompts are bytes, but generated tokens come from the whole vocabulary."""
    llm = ModelSource(name, random_weights=True, device="cpu", dtype=None).llm({})
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=3, temperature=50.0)
    (output,) = llm.generate("Hello", params)
    assert llm.tokenizer.encode("Hello") == list(b"Hello")
    assert max(output.token_ids) > 256
    assert output.text is not None
    named = next(token for token in output.token_ids if token > 256)
    assert f"<{named}>" in output.text


def test_the_end_of_a_text_is_the_tokenizers(name: str) -> None:
    llm = ModelSource(name, random_weights=True, device="cpu", dtype="bfloat16").llm({})
    assert llm.tokenizer.eos_token_id == architecture(name).eos_token_id
    assert llm.engine.sequence_runner.model.dtype is torch.bfloat16


def test_only_named_architectures_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown architecture 'gpt5'; use one of gpt2, llama-1b, "
    ):
        random_model("gpt5", "cpu", None)


def test_the_full_sizes_are_those_they_are_named_for() -> None:
    """GPT-2's table of positions is not read; that of tokens is, for it is also the last layer."""
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
def test_others_are_as_large_as_what_they_are_named_for(name: str, million: int) -> None:
    network = ModelSource(name, random_weights=True, device=None, dtype=None).skeleton()
    assert round(sum(weight.numel() for weight in network.parameters()) / 1e6) == million


def test_experts_that_one_row_does_not_visit_are_not_read() -> None:
    olmoe = ModelSource("olmoe-1b-7b", random_weights=True, device=None, dtype=None).skeleton()
    layer = 4 * 2048 * 2048 + 64 * 2048 + 8 * 3 * 2048 * 1024 + 4 * 2048
    assert count_weights_read(olmoe) == 50304 * 2048 + 16 * layer + 2048


@pytest.mark.parametrize("name", cases.ARCHITECTURES)
def test_all_but_one_have_fused_kernels(name: str) -> None:
    network = ModelSource(name, random_weights=True, device=None, dtype=None).skeleton()
    assert (fused_family(network.bfloat16()) is None) == (name == "pythia-410m")


def test_untied_a_table_of_tokens_is_not_read_but_the_last_layer_is() -> None:
    tiny = ModelSource("tiny", random_weights=False, device=None, dtype=None).skeleton()
    everything = sum(weight.numel() for weight in tiny.parameters())
    assert count_weights_read(tiny) == everything - (257 + 1024) * 64


def test_the_floor_is_bytes_by_bandwidth() -> None:
    floor = memory_floor(
        ModelSource("tiny", random_weights=False, device="cpu", dtype=None).skeleton(),
        LLM("tiny", device="cpu"),
    )
    assert floor.token_bytes == 2 * 2 * 64 * 4  # keys and values, layers, width, float32
    assert floor.bandwidth > 1e8
    known = MemoryFloor(weight_bytes=100, token_bytes=3, bandwidth=50.0)
    assert known.seconds(2, 7) == (2 * 100 + 7 * 3) / 50.0
