"""Check of fused kernels at load: they read weights, and ignore replaced modules."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig

from roseinfer import LLM, ConfigError, EngineConfig, EnginePath
from roseinfer.models.causal import CausalModel
from roseinfer.models.families import fused_family
from roseinfer.models.fused_checks import _SingleSequenceAttention, matches_modules
from roseinfer.models.joined_llama import JoinedLlama
from roseinfer.models.load_checks import is_close
from roseinfer.models.loading import load
from roseinfer.models.tiny import tiny_gpt2
from tests.models.families import scale_weights_up
from tests.models.fused.test_llama import SHAPE, network


class Adapted(torch.nn.Module):
    """Adapter that adds to the output of a layer, and exposes that layer's weight."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.layer.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.layer.bias  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output + 0.5 * output.roll(1, -1)


def build(device: str, name: str) -> Any:
    """Build a model in a dtype that kernels run on the device."""
    return network(name, device).to(torch.bfloat16 if device == "cuda" else torch.float32)


def build_adapted(device: str, name: str) -> Any:
    if name == "gpt2":
        model: Any = tiny_gpt2().model.to(device)
        mlp = model.transformer.h[1].mlp
        mlp.c_proj = Adapted(mlp.c_proj)
    else:
        model = build(device, name)
        attention = model.model.layers[0].self_attn
        attention.o_proj = Adapted(attention.o_proj)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2"])
def test_model_with_an_adapter_runs_on_its_modules(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="fused_model=True: the fused kernels for"):
        LLM(build_adapted(device, name), device=device, fused_model=True)
    monkeypatch.setattr(EngineConfig, "is_enabled", lambda _, switch, __: switch == "fused_model")
    with caplog.at_level(logging.WARNING):
        loaded = load(build_adapted(device, name), EngineConfig(), device=device)
    assert EnginePath.FUSED not in loaded.model.paths
    assert "it runs on its modules" in caplog.text


def test_unchanged_model_runs_on_fused_kernels(device: str) -> None:
    loaded = load(build(device, "granite"), EngineConfig(fused_model=True), device=device)
    assert loaded.model.paths == (EnginePath.FUSED,)


def amplifying_model() -> Any:
    """Build a 16-bit model that amplifies rounding as trained ones do."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | {"num_hidden_layers": 20}))
    with torch.no_grad():
        for layer in scale_weights_up(model).model.layers:
            layer.self_attn.q_proj.weight.mul_(3)
    return JoinedLlama(model.bfloat16())


def test_model_that_amplifies_rounding_passes_the_check() -> None:
    model = amplifying_model()
    tokens, positions = torch.tensor([1, 2, 0, 4]), torch.tensor([0, 1, 94, 95])
    attention = _SingleSequenceAttention(model.traits)
    assert not is_close(*model.fused_and_module_logits(tokens, positions, attention))
    assert matches_modules(model)


def test_adapter_of_a_model_that_amplifies_rounding_fails_the_check() -> None:
    model = amplifying_model()
    attention = model.network.model.layers[0].self_attn
    attention.o_proj = Adapted(attention.o_proj)
    assert not matches_modules(model)


def many_experts(device: str) -> Any:
    """Build a 16-bit model in which rounding decides between experts in nearly every layer."""
    torch.manual_seed(1)
    sizes = {**SHAPE, "num_hidden_layers": 10, "intermediate_size": 32, "eos_token_id": None}
    config = OlmoeConfig(**sizes, num_experts=40, num_experts_per_tok=6)
    model = scale_weights_up(AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(4)
    return model.to(device, torch.bfloat16)


def family_with_experts(model: Any) -> Any:
    family: Any = fused_family(model)
    return family(model)


@pytest.mark.slow
def test_near_ties_between_experts_pass_the_check(device: str) -> None:
    """Without forced routing, the modules send some token to another expert and diverge there."""
    fused = family_with_experts(many_experts(device))
    assert matches_modules(fused)
    exact = family_with_experts(many_experts("cpu").float())
    rounded = family_with_experts(many_experts("cpu"))
    tokens, positions = torch.arange(4) + 1, torch.arange(4)
    alone = [
        CausalModel.logits(each, tokens, positions, None, _SingleSequenceAttention(each.traits))
        for each in (exact, rounded)
    ]
    assert not is_close(alone[0].bfloat16(), alone[1])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["router", "gates", "output", "weights"])
def test_wrong_experts_fail_the_check(device: str, part: str) -> None:
    fused = family_with_experts(many_experts(device))
    layer = fused._layers[2]
    mlp = layer.mlp
    changes = {
        "router": {"router": mlp.router.roll(1, 0)},
        "gates": {"gate_up_weight": mlp.gate_up_weight.roll(1, 0)},
        "output": {"down": mlp.down.roll(1, 0)},
        "weights": {"renormalize": not mlp.renormalize},
    }
    fused._layers[2] = replace(layer, mlp=replace(mlp, **changes[part]))
    assert not matches_modules(fused)
