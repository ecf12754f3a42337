"""Llama and its relatives on fused kernels, compared with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import EnginePath
from roseinfer.engine.runner import SequenceRunner
from roseinfer.models.families import fused_family, layers
from roseinfer.models.families.llama import FusedLlama
from tests.models.families import scale_weights_up
from tests.models.fused.runners import assert_close, fused_runner, transformers_logits

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
    """Build a model whose gains and biases are not the initial ones."""
    torch.manual_seed(1)
    model = scale_weights_up(transformers.AutoModelForCausalLM.from_config(KIN[kin]()))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn(weight.shape))
    return model.to(device)


def family_of(kin: str) -> type[CausalModel]:
    family = fused_family(network(kin, "cpu"))
    assert family is not None
    return family


@pytest.mark.sampled_cases
@pytest.mark.parametrize("kin", KIN)
def test_prefill_and_decode_match_transformers(device: str, kin: str) -> None:
    """Logits of prompts, then of single tokens, for several sequences at once."""
    model = network(kin, device)
    engine = fused_runner(family_of(kin), device, model)
    sessions, logits = engine.prefill(PROMPTS)
    assert_close(logits, transformers_logits(model, PROMPTS))
    for step in range(2):
        for session, token in zip(sessions, logits.argmax(-1).tolist(), strict=True):
            session.token_ids.append((token + step) % 97)
        logits = engine.extend(sessions)
        assert_close(
            logits, transformers_logits(model, [session.token_ids for session in sessions])
        )
    assert engine.path_counts[EnginePath.FUSED] == 3


@pytest.mark.parametrize("max_rows", [1, 19])
def test_rows_beyond_the_kernel_limit_match_transformers(
    device: str, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's GEMMs take over, for all layers or for all but the head."""
    monkeypatch.setattr(layers, "MAX_ROWS", max_rows)
    model = network("qwen2", device)
    _, logits = fused_runner(FusedLlama, device, model).prefill(PROMPTS)
    assert_close(logits, transformers_logits(model, PROMPTS))


@pytest.mark.parametrize("kin", ["granite", "qwen2"])
def test_gemms_that_add_to_the_residual_match_transformers(
    device: str, kin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite adds the GEMM's result with a factor."""
    factors = []

    def add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *factor: float) -> None:
        factors.append(factor)
        residual += factor[1] * (x @ weight.T)

    monkeypatch.setattr(layers, "MAX_ROWS", 1)
    monkeypatch.setattr(layers, "splits_evenly", lambda *_: True)
    monkeypatch.setattr(layers, "can_add_paired_gemm", lambda *_: True)
    monkeypatch.setattr(layers, "add_paired_gemm", add)
    model = network(kin, device)
    engine = fused_runner(FusedLlama, device, model)
    engine.model.batch_invariant = True
    _, logits = engine.prefill(PROMPTS)
    assert_close(logits, transformers_logits(model, PROMPTS))
    assert len(factors) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "always", "parts"),
    [(64, False, 4), (65, False, 4), (512, False, 4), (513, False, 1), (513, True, 4)],
)
def test_split_k_gemm_matches_the_reference(
    device: str, dtype: torch.dtype, rows: int, always: bool, parts: int
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 2048, device=device), torch.randn(40, 2048, device=device)
    x, weight = x.to(dtype), (weight / 2048**0.5).to(dtype)
    actual = layers.split_k_gemm(x, weight, always=always)
    assert actual.shape == (parts, rows, 40)
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(actual.double().sum(0), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kin", ["qwen3", "olmo2"])
def test_reference_attention_matches_transformers(device: str, kin: str) -> None:
    model = network(kin, device)
    fused_model = fused_runner(family_of(kin), device, model)
    plain = SequenceRunner(fused_model.model, fused_model.kv, attention="reference")
    _, logits = plain.prefill(PROMPTS)
    assert_close(logits, transformers_logits(model, PROMPTS))


def test_fused_weights_share_memory_with_the_model() -> None:
    model = network("llama", "cpu")
    before = sum(weight.numel() for weight in model.parameters())
    fused_model = FusedLlama(model)
    memory = {weight.untyped_storage().data_ptr(): weight for weight in model.parameters()}
    assert sum(each.untyped_storage().nbytes() for each in memory.values()) == 4 * before
    assert fused_model._layers[0].qkv.data_ptr() in memory


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
def test_variants_are_unsupported(settings: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, **settings})
    assert not FusedLlama.is_supported(transformers.AutoModelForCausalLM.from_config(config))


def test_olmoe_with_clipped_queries_is_unsupported() -> None:
    for cut, fits in ((None, True), (0.5, False)):
        config = transformers.OlmoeConfig(**SHAPE, num_experts=3, clip_qkv=cut)
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert (fused_family(model) is not None) == fits
