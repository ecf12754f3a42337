"""GPT-2 on fused kernels, compared with transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers

from roseinfer import LLM, EnginePath
from roseinfer.models.causal import CausalModel
from roseinfer.models.families import fused_family, gpt2, register_family
from roseinfer.models.families.gpt2 import FusedGPT2
from tests.models.families import tiny
from tests.models.fused.runners import assert_close, fused_runner, transformers_logits

PROMPTS = [[7, 3, 90, 12, 5], [1], list(range(40))]


def test_prefill_and_decode_match_transformers(device: str) -> None:
    """Logits of prompts, then of single tokens, for several sequences at once."""
    network = tiny("gpt2", device)
    engine = fused_runner(FusedGPT2, device, network)
    sessions, logits = engine.prefill(PROMPTS)
    assert_close(logits, transformers_logits(network, PROMPTS))
    for step in range(4):
        for session, token in zip(sessions, logits.argmax(-1).tolist(), strict=True):
            session.token_ids.append((token + step) % 97)
        logits = engine.extend(sessions)
        tokens = [session.token_ids for session in sessions]
        assert_close(logits, transformers_logits(network, tokens))
    assert engine.path_counts[EnginePath.FUSED] == 5


@pytest.mark.sampled_cases
@pytest.mark.parametrize("max_rows", [1, 2, 45])
def test_rows_beyond_the_kernel_limit_match_transformers(
    device: str, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's GEMMs take over, for all layers or for all but the head."""
    network = tiny("gpt2", device)
    runner = fused_runner(FusedGPT2, device, network)
    monkeypatch.setattr(runner.model, "_max_rows", max_rows)
    _, logits = runner.prefill(PROMPTS)
    assert_close(logits, transformers_logits(network, PROMPTS))


def test_float32_is_multiplied_by_torch_on_a_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("linear", "split_k_linear"):
        kernel = getattr(gpt2, name)

        def counted(*args: Any, name: str = name, kernel: Any = kernel, **options: Any) -> Any:
            calls.append(name)
            return kernel(*args, **options)

        monkeypatch.setattr(gpt2, name, counted)
    network = tiny("gpt2", device)
    _, logits = fused_runner(FusedGPT2, device, network).prefill(PROMPTS)
    assert_close(logits, transformers_logits(network, PROMPTS))
    assert set(calls) == ({"linear", "split_k_linear"} if device == "cpu" else set())


def test_random_biases_and_norms_match_transformers(device: str) -> None:
    """Tiny models have trivial ones: biases of 0 and gains of 1."""
    network = tiny("gpt2", device)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn(weight.shape).to(device))
    _, logits = fused_runner(FusedGPT2, device, network).prefill(PROMPTS)
    assert_close(logits, transformers_logits(network, PROMPTS))


def variant(**settings: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=96, **settings
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_standard_gpt2_is_supported() -> None:
    assert fused_family(variant()) is FusedGPT2


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"activation_function": "relu"},
        {"activation_function": "gelu"},
        {"add_cross_attention": True},
    ],
    ids=str,
)
def test_unsupported_variants_run_on_their_modules(device: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(3)
    network = variant(**settings).to(device)
    assert fused_family(network) is None
    if not settings.get("add_cross_attention"):
        llm = LLM(network, device=device, fused_model=True, kv_cache_tokens=64)
        llm.generate([[1, 2, 3]], progress=False)
        assert not llm.engine.path_counts[EnginePath.FUSED]


def test_other_models_are_unsupported(device: str) -> None:
    assert fused_family(tiny("gemma2", device)) is None


def test_registered_family_is_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.models.families._FAMILIES", {})

    @register_family("LlamaForCausalLM")
    class Family(CausalModel):
        paths = (EnginePath.FUSED,)

        @staticmethod
        def is_supported(model: Any) -> bool:
            return bool(model.config.hidden_act == "silu")

    network = deepcopy(tiny("llama", device))
    assert fused_family(variant()) is None
    llm = LLM(network, device=device, fused_model=True, kv_cache_tokens=64)
    assert type(llm.engine.sequence_runner.model) is Family
    network.config.hidden_act = "relu"
    assert fused_family(network) is None
