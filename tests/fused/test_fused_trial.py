"""Fused kernels are tried when a model is loaded: they read weights and know no modules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from roseinfer import LLM, ConfigError, EngineConfig, EnginePath
from roseinfer.models.loading import load
from roseinfer.models.tiny import tiny_gpt2
from tests.fused.test_llama import network


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
    monkeypatch.setattr(EngineConfig, "wants", lambda _, switch, __: switch == "fused_model")
    with caplog.at_level(logging.WARNING):
        loaded = load(adapted(device, name), EngineConfig(), device=device)
    assert EnginePath.FUSED not in loaded.model.paths
    assert "it runs on its modules" in caplog.text


def test_a_model_as_it_was_made_runs_on_kernels(device: str) -> None:
    loaded = load(made(device, "granite"), EngineConfig(fused_model=True), device=device)
    assert loaded.model.paths == (EnginePath.FUSED,)
