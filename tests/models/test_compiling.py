"""Compiled layers: what a model generates with them, and what cannot be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.errors import ConfigError
from roseinfer.models.causal import compile_layers
from tests.models.families import tiny

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3, 5]]


def generated(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=6, ignore_eos=True))
    return [output.token_ids for output in outputs]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """This backend notes what is compiled and runs it unchanged: the rest is torch's affair."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    real = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: real(self, backend=backend, **how)
    )
    torch.compiler.reset()
    return found


@pytest.mark.filterwarnings(  # some versions of torch warn of themselves when they compile
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_same_tokens_come(family: str, graphs: list[torch.fx.GraphModule]) -> None:
    plain = LLM(tiny(family, "cpu"), device="cpu", kv_cache_tokens=256)
    compiled = LLM(tiny(family, "cpu"), device="cpu", kv_cache_tokens=256, compile_layers=True)
    assert generated(compiled) == generated(plain)
    assert graphs, "nothing was compiled"
    assert compiled.engine.path_counts[EnginePath.COMPILED] >= 6
    operations = [node.target for graph in graphs for node in graph.graph.nodes]
    products = [each for each in operations if each is torch.nn.functional.linear]
    assert len(products) >= 7, "a layer's matrix products are in it"
    made = []
    for length in (4, 6, 8, 10):  # a single token, which the first brings, torch compiles apart
        compiled.generate([list(range(1, length))], SamplingParams(max_new_tokens=2))
        made.append(len(graphs))
    assert made == made[:1] * 4, "compiled again for other numbers of tokens"


def test_a_model_on_fused_kernels_has_nothing_to_compile(roseinfer_device: str) -> None:
    with pytest.raises(ConfigError, match="fused_model=False"):
        LLM("tiny", device=roseinfer_device, fused_model=True, compile_layers=True)


def test_a_model_whose_layers_are_not_known() -> None:
    with pytest.raises(ConfigError, match="does not say which"):
        compile_layers(torch.nn.Linear(2, 2))
