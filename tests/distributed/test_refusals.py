"""Models and settings that cannot be sharded: rejected by name, with no process left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from roseinfer import LLM, ConfigError, RanksFailed, UnsupportedModel
from roseinfer.config import TorchrunRank
from roseinfer.distributed import sharding
from tests.distributed.followers import build, run_ranks_in_threads
from tests.models.families import CONFIGS, SHAPE, scale_weights_up

if TYPE_CHECKING:
    from collections.abc import Callable


def rejection_of(model: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> str:
    started = run_ranks_in_threads(monkeypatch)
    with pytest.raises(UnsupportedModel) as info:
        LLM(model, device="cpu", tensor_parallel_size=size, kv_cache_tokens=64)
    for other in started:
        other.wait()
        assert [type(error) for error in other.error] == [UnsupportedModel]
    return str(info.value)


def build_from(config: Callable[[], Any]) -> Any:
    return scale_weights_up(transformers.AutoModelForCausalLM.from_config(config()))


def test_indivisible_heads_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    message = rejection_of(build_from(CONFIGS["llama"]), 4, monkeypatch)
    assert message == (
        "tensor_parallel_size=4: it must divide the 2 key-value heads of LlamaForCausalLM"
    )


def test_model_without_a_plan_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    bloom = transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4)
    message = rejection_of(build_from(lambda: bloom), 2, monkeypatch)
    assert message == ("tensor_parallel_size=2: transformers has no plan for BloomForCausalLM")


def test_unsupported_plan_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    message = rejection_of(build_from(lambda: transformers.MixtralConfig(**SHAPE)), 2, monkeypatch)
    assert "transformers has an unsupported plan" in message
    assert message.endswith(" for MixtralForCausalLM")
    assert "moe_tp_experts" in message


def test_incomplete_plan_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dict(transformers.LlamaConfig.base_model_tp_plan)
    del plan["layers.*.mlp.down_proj"]
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    message = rejection_of(build(transformers.LlamaConfig), 2, monkeypatch)
    assert message.startswith(
        "tensor_parallel_size=2: LlamaForCausalLM cannot be run sharded: mat1"
    )


def test_missing_all_reduce_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(shard: Any, x: Any) -> Any:
        return x @ shard.weight.T

    monkeypatch.setattr(sharding.RowParallelLinear, "forward", forward)
    message = rejection_of(build(transformers.LlamaConfig), 2, monkeypatch)
    assert "the sharded LlamaForCausalLM computes other logits than the whole one" in message


@pytest.mark.parametrize("switch", ["per_layer_kv", "compile_layers"])
def test_single_gpu_switches_are_rejected(switch: str) -> None:
    both: dict[str, Any] = {"tensor_parallel_size": 2, switch: True}
    with pytest.raises(ConfigError, match=f"{switch} is for one GPU: leave it off, or tensor_par"):
        LLM("tiny", **both)


def test_rank_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RanksFailed, match="a rank ended with status 1 before the model was loaded"):
        LLM("tiny", device="cpu", tensor_parallel_size=2)


def test_torchrun_environment_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
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
