"""Fused kernels are tried when a model is loaded: they read weights and know no modules."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig

from roseinfer import LLM, ConfigError, EngineConfig, EnginePath
from roseinfer.models.causal import CausalModel
from roseinfer.models.checks import is_close
from roseinfer.models.families import fused_family
from roseinfer.models.fused_checks import _SingleSequenceAttention, matches_modules
from roseinfer.models.loading import load
from roseinfer.models.tiny import tiny_gpt2
from tests.models.families import scaled_up
from tests.models.fused.test_llama import SHAPE, network


class Adapted(torch.nn.Module):
    """Adds to what a layer computes, as an adapter does, and shows the weight of that layer."""

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
        found: torch.Tensor = self.layer(x)
        return found + 0.5 * found.roll(1, -1)


def made(device: str, name: str) -> Any:
    """Return a model of a dtype that kernels run on the device."""
    return network(name, device).to(torch.bfloat16 if device == "cuda" else torch.float32)


def adapted(device: str, name: str) -> Any:
    if name == "gpt2":
        model: Any = tiny_gpt2().model.to(device)
        mlp = model.transformer.h[1].mlp
        mlp.c_proj = Adapted(mlp.c_proj)
    else:
        model = made(device, name)
        attention = model.model.layers[0].self_attn
        attention.o_proj = Adapted(attention.o_proj)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2"])
def test_an_adapter_is_not_left_out(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="fused_model=True: the fused kernels for"):
        LLM(adapted(device, name), device=device, fused_model=True)
    monkeypatch.setattr(EngineConfig, "is_enabled", lambda _, switch, __: switch == "fused_model")
    with caplog.at_level(logging.WARNING):
        loaded = load(adapted(device, name), EngineConfig(), device=device)
    assert EnginePath.FUSED not in loaded.model.paths
    assert "it runs on its modules" in caplog.text


def test_a_model_as_it_was_made_runs_on_kernels(device: str) -> None:
    loaded = load(made(device, "granite"), EngineConfig(fused_model=True), device=device)
    assert loaded.model.paths == (EnginePath.FUSED,)


def many_experts(device: str) -> Any:
    """A model in 16 bits, in which rounding decides between experts in nearly every layer."""
    torch.manual_seed(1)
    sizes = {**SHAPE, "num_hidden_layers": 10, "intermediate_size": 32, "eos_token_id": None}
    config = OlmoeConfig(**sizes, num_experts=40, num_experts_per_tok=6)
    model = scaled_up(AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(4)
    return model.to(device, torch.bfloat16)


def family_with_experts(model: Any) -> Any:
    family: Any = fused_family(model)
    return family(model)


def test_near_ties_between_experts_decide_nothing(device: str) -> None:
    """Left to themselves, the modules send some token to another expert, and part from there."""
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


@pytest.mark.parametrize("wrong", ["the router", "gates", "what comes out", "weights"])
def test_experts_that_are_wrong_are_not_near_ties(device: str, wrong: str) -> None:
    fused = family_with_experts(many_experts(device))
    layer = fused._layers[2]
    own = layer.mlp
    changed = {
        "the router": {"router": own.router.roll(1, 0)},
        "gates": {"gate_up_weight": own.gate_up_weight.roll(1, 0)},
        "what comes out": {"down": own.down.roll(1, 0)},
        "weights": {"renormalize": not own.renormalize},
    }
    fused._layers[2] = replace(layer, mlp=replace(own, **changed[wrong]))
    assert not matches_modules(fused)
