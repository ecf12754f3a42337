"""Llama and its kin on fused kernels against transformers' own, whose weights they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import EnginePath
from roseinfer.engine.runner import SequenceRunner
from roseinfer.models.families import fused_family, layers
from roseinfer.models.families.llama import FusedLlama
from tests.models.families import scaled_up
from tests.models.fused.runners import assert_close, by_transformers, fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.models.causal import CausalModel

PROMPTS = [[7, 3, 90, 12, 5], [1], list(range(14))]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KIN: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama 3": lambda: transformers.LlamaConfig(
        **SHAPE,
        rope_parameters={**SCALED, "rope_theta": 1e4, "original_max_position_embeddings": 24},
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, head_dim=20, sliding_window=None),
    "mistral window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=20),
    "phi3": lambda: transformers.Phi3Config(**SHAPE),
    "phi3, half of a head": lambda: transformers.Phi3Config(
        **SHAPE,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**SHAPE, no_rope_layer_interval=2),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE | {"num_hidden_layers": 3},
        head_dim=20,
        moe_intermediate_size=40,
        num_experts=70,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SHAPE, num_experts=5, num_experts_per_tok=3),
}


def network(kin: str, device: str) -> Any:
    """Build a model whose gains and biases are not those that every model begins with."""
    torch.manual_seed(1)
    model = scaled_up(transformers.AutoModelForCausalLM.from_config(KIN[kin]()))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn(weight.shape))
    return model.to(device)


def family_of(kin: str) -> type[CausalModel]:
    family = fused_family(network(kin, "cpu"))
    assert family is not None
    return family


@pytest.mark.parametrize("kin", KIN)
def test_prompts_and_what_follows_them(device: str, kin: str) -> None:
    """A prompt's own logits, then those of single tokens, several sequences at once."""
    model = network(kin, device)
    engine = fused(family_of(kin), device, model)
    sessions, logits = engine.prefill(PROMPTS)
    assert_close(logits, by_transformers(model, PROMPTS))
    for step in range(2):
        for session, token in zip(sessions, logits.argmax(-1).tolist(), strict=True):
            session.token_ids.append((token + step) % 97)
        logits = engine.extend(sessions)
        assert_close(logits, by_transformers(model, [session.token_ids for session in sessions]))
    assert engine.path_counts[EnginePath.FUSED] == 3


@pytest.mark.parametrize("most", [1, 19])
def test_more_rows_than_are_read_for_once(
    device: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's products take over, for all layers or for all but the head."""
    monkeypatch.setattr(layers, "MAX_ROWS", most)
    model = network("qwen2", device)
    _, logits = fused(FusedLlama, device, model).prefill(PROMPTS)
    assert_close(logits, by_transformers(model, PROMPTS))


@pytest.mark.parametrize("kin", ["granite", "qwen2"])
def test_products_that_are_added_where_they_are_made(
    device: str, kin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite adds no whole product, but a share of it."""
    added = []

    def add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *by: float) -> None:
        added.append(by)
        residual += by[1] * (x @ weight.T)

    monkeypatch.setattr(layers, "MAX_ROWS", 1)
    monkeypatch.setattr(layers, "splits_evenly", lambda *_: True)
    monkeypatch.setattr(layers, "can_add_paired_gemm", lambda *_: True)
    monkeypatch.setattr(layers, "add_paired_gemm", add)
    model = network(kin, device)
    engine = fused(FusedLlama, device, model)
    engine.model.batch_invariant = True
    _, logits = engine.prefill(PROMPTS)
    assert_close(logits, by_transformers(model, PROMPTS))
    assert len(added) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "always", "parts"),
    [(64, False, 4), (65, False, 4), (512, False, 4), (513, False, 1), (513, True, 4)],
)
def test_products_in_parts(
    device: str, dtype: torch.dtype, rows: int, always: bool, parts: int
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 2048, device=device), torch.randn(40, 2048, device=device)
    x, weight = x.to(dtype), (weight / 2048**0.5).to(dtype)
    got = layers.split_k_gemm(x, weight, always=always)
    assert got.shape == (parts, rows, 40)
    far = 2e-5 if dtype is torch.float32 else 3e-2
    want = x.double() @ weight.double().T
    torch.testing.assert_close(got.double().sum(0), want, atol=far, rtol=far)


@pytest.mark.parametrize("kin", ["qwen3", "olmo2"])
def test_the_reference_rotates_too(device: str, kin: str) -> None:
    model = network(kin, device)
    own = fused(family_of(kin), device, model)
    plain = SequenceRunner(own.model, own.kv, attention="reference")
    _, logits = plain.prefill(PROMPTS)
    assert_close(logits, by_transformers(model, PROMPTS))


def test_weights_are_stored_once() -> None:
    model = network("llama", "cpu")
    before = sum(weight.numel() for weight in model.parameters())
    own = FusedLlama(model)
    memory = {weight.untyped_storage().data_ptr(): weight for weight in model.parameters()}
    assert sum(each.untyped_storage().nbytes() for each in memory.values()) == 4 * before
    assert own._layers[0].qkv.data_ptr() in memory


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=str,
)
def test_variants_do_not_fit(settings: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, **settings})
    assert not FusedLlama.is_supported(transformers.AutoModelForCausalLM.from_config(config))


def test_a_model_with_experts_that_cuts_queries_off_does_not_fit() -> None:
    for cut, fits in ((None, True), (0.5, False)):
        config = transformers.OlmoeConfig(**SHAPE, num_experts=3, clip_qkv=cut)
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert (fused_family(model) is not None) == fits
