"""What cannot be shared among ranks is refused by name, and no process is left behind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from roseinfer import LLM, ConfigError, RanksFailed, UnsupportedModel
from roseinfer.config import TorchrunRank
from roseinfer.distributed import sharding
from tests.distributed.followers import build, in_threads
from tests.models.families import CONFIGS, SHAPE, scaled_up

if TYPE_CHECKING:
    from collections.abc import Callable


def refused(model: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> str:
    started = in_threads(monkeypatch)
    with pytest.raises(UnsupportedModel) as info:
        LLM(model, device="cpu", tensor_parallel_size=size, kv_cache_tokens=64)
    for other in started:
        other.wait()
        assert [type(error) for error in other.error] == [UnsupportedModel]
    return str(info.value)


def of(config: Callable[[], Any]) -> Any:
    return scaled_up(transformers.AutoModelForCausalLM.from_config(config()))


def test_heads_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    why = refused(of(CONFIGS["llama"]), 4, monkeypatch)
    assert why == (
        "tensor_parallel_size=4: it must divide the 2 key-value heads of LlamaForCausalLM"
    )


def test_a_model_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    bloom = transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4)
    why = refused(of(lambda: bloom), 2, monkeypatch)
    assert why == ("tensor_parallel_size=2: transformers has no plan for BloomForCausalLM")


def test_a_plan_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    why = refused(of(lambda: transformers.MixtralConfig(**SHAPE)), 2, monkeypatch)
    assert "transformers has an unsupported plan" in why
    assert why.endswith(" for MixtralForCausalLM")
    assert "moe_tp_experts" in why


def test_a_plan_that_forgets_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dict(transformers.LlamaConfig.base_model_tp_plan)
    del plan["layers.*.mlp.down_proj"]
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    why = refused(build(transformers.LlamaConfig), 2, monkeypatch)
    assert why.startswith("tensor_parallel_size=2: LlamaForCausalLM cannot be run sharded: mat1")


def test_results_that_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(shard: Any, x: Any) -> Any:
        return x @ shard.weight.T

    monkeypatch.setattr(sharding.RowParallelLinear, "forward", forward)
    why = refused(build(transformers.LlamaConfig), 2, monkeypatch)
    assert "the sharded LlamaForCausalLM computes other logits than the whole one" in why


@pytest.mark.parametrize("switch", ["per_layer_kv", "compile_layers"])
def test_switches_for_one_process(switch: str) -> None:
    both: dict[str, Any] = {"tensor_parallel_size": 2, switch: True}
    with pytest.raises(ConfigError, match=f"{switch} is for one GPU: leave it off, or tensor_par"):
        LLM("tiny", **both)


def test_a_rank_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RanksFailed, match="a rank ended with status 1 before the model was loaded"):
        LLM("tiny", device="cpu", tensor_parallel_size=2)


def test_processes_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchrunRank.from_env() is None
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    assert TorchrunRank.from_env() == TorchrunRank(1, 4)
    with pytest.raises(ConfigError, match="torchrun started 4 processes: give torchrun --nproc-"):
        LLM("tiny", device="cpu", tensor_parallel_size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="on several hosts: the ranks of a model are all on one"):
        TorchrunRank.from_env()
