"""Compiled layers: their tokens, and models that cannot be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.errors import ConfigError
from roseinfer.models.causal import compile_layers
from tests.models.families import tiny

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3, 5]]


def generate_tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=6, ignore_eos=True))
    return [output.token_ids for output in outputs]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Graphs compiled by a backend that records them and runs them unchanged."""
    recorded: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        recorded.append(graph)
        return graph.forward

    real = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: real(self, backend=backend, **options)
    )
    torch.compiler.reset()
    return recorded


@pytest.mark.slow
@pytest.mark.filterwarnings(  # raised inside of some torch versions when they compile
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
@pytest.mark.sampled_cases
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_layers_generate_the_same_tokens(
    family: str, graphs: list[torch.fx.GraphModule]
) -> None:
    plain = LLM(tiny(family, "cpu"), device="cpu", kv_cache_tokens=256)
    compiled = LLM(tiny(family, "cpu"), device="cpu", kv_cache_tokens=256, compile_layers=True)
    assert generate_tokens(compiled) == generate_tokens(plain)
    assert graphs, "no graph was compiled"
    assert compiled.engine.path_counts[EnginePath.COMPILED] >= 6
    operations = [node.target for graph in graphs for node in graph.graph.nodes]
    gemms = [each for each in operations if each is torch.nn.functional.linear]
    assert len(gemms) >= 7, "the graphs lack GEMMs of the layer"
    num_graphs = []
    for length in (4, 6, 8, 10):  # torch compiles the first, single token separately
        compiled.generate([list(range(1, length))], SamplingParams(max_new_tokens=2))
        num_graphs.append(len(graphs))
    assert num_graphs == num_graphs[:1] * 4, "compiled again for other numbers of tokens"


def test_compile_layers_is_rejected_with_fused_kernels(roseinfer_device: str) -> None:
    with pytest.raises(ConfigError, match="fused_model=False"):
        LLM("tiny", device=roseinfer_device, fused_model=True, compile_layers=True)


def test_compile_layers_is_rejected_for_unknown_layers() -> None:
    with pytest.raises(ConfigError, match="does not say which"):
        compile_layers(torch.nn.Linear(2, 2))
