"""Settings: defaults, environment variables, and invalid values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from roseinfer import AppendPolicy, ConfigError, EngineConfig

SWITCH = "ROSELLM_TRITON_KV_APPEND"
MIN_BATCH = "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"
FULL_BATCH = "ROSELLM_TRITON_KV_APPEND_FULL_BATCH_MIN_BATCH"


def test_empty_environment_gives_the_defaults() -> None:
    assert AppendPolicy.from_env({}) == AppendPolicy()


def test_default_policy_has_every_path_on() -> None:
    policy = AppendPolicy()
    switches = [f.name for f in fields(policy) if f.type == "bool"]
    assert len(switches) == 6
    assert all(getattr(policy, name) for name in switches)
    assert policy.triton_min_batch == policy.full_batch_threshold == 1


@pytest.mark.parametrize("name", [field.name for field in fields(AppendPolicy)])
def test_policy_is_frozen(name: str) -> None:
    policy = AppendPolicy()
    with pytest.raises(FrozenInstanceError):
        setattr(policy, name, getattr(policy, name))


def test_policies_compare_and_hash_by_value() -> None:
    assert len({AppendPolicy(), AppendPolicy(triton=True), AppendPolicy(triton=False)}) == 2


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("on", True), ("1", True), ("true", True), ("yes", True), (" On\n", True),
        ("off", False), ("0", False), ("false", False), ("no", False), ("OFF", False),
    ],
)  # fmt: skip
def test_switch_variable(text: str, on: bool) -> None:
    assert AppendPolicy.from_env({SWITCH: text}) == AppendPolicy(triton=on)


@pytest.mark.parametrize("number", [0, 1, 8, 4096])
def test_first_threshold_is_the_default_of_the_second(number: int) -> None:
    policy = AppendPolicy.from_env({MIN_BATCH: str(number)})
    assert policy == AppendPolicy(triton_min_batch=number)
    assert policy.full_batch_threshold == number


@pytest.mark.parametrize("number", [0, 3])
def test_full_batch_threshold_alone(number: int) -> None:
    policy = AppendPolicy.from_env({FULL_BATCH: str(number)})
    assert (policy.triton_min_batch, policy.full_batch_threshold) == (1, number)


def test_both_thresholds() -> None:
    policy = AppendPolicy.from_env({MIN_BATCH: "8", FULL_BATCH: "2"})
    assert (policy.triton_min_batch, policy.full_batch_threshold) == (8, 2)


@pytest.mark.parametrize("variable", [MIN_BATCH, FULL_BATCH])
@pytest.mark.parametrize("text", ["eight", "8.0", "1e3", "-1", "", " ", "0x10", "8 tokens"])
def test_threshold_that_is_no_whole_number_is_refused(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppendPolicy.from_env({variable: text})
    message = str(caught.value)
    assert message.startswith(f"{variable}={text!r}")
    assert "whole number" in message


@pytest.mark.parametrize("text", ["maybe", "", "2", "enabled"])
def test_switch_that_is_neither_on_nor_off_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppendPolicy.from_env({SWITCH: text})
    message = str(caught.value)
    assert message.startswith(f"{SWITCH}={text!r}")
    assert "on or off" in message


@pytest.mark.parametrize("name", ["triton_min_batch", "triton_full_batch_min_batch"])
@pytest.mark.parametrize("value", [-1, 1.0, "8", True])
def test_threshold_in_code_is_validated(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"AppendPolicy\.{name} must be .*, not {value!r}"):
        AppendPolicy(**{name: value})


def test_threshold_none_is_refused() -> None:
    none: Any = None
    with pytest.raises(ConfigError, match="triton_min_batch must be a whole number"):
        AppendPolicy(triton_min_batch=none)


def test_only_from_env_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, "off")
    monkeypatch.setenv(MIN_BATCH, "5")
    monkeypatch.setenv(FULL_BATCH, "7")
    policy = AppendPolicy.from_env()
    monkeypatch.setenv(FULL_BATCH, "nonsense")
    assert policy == AppendPolicy(triton=False, triton_min_batch=5, triton_full_batch_min_batch=7)
    assert AppendPolicy() == AppendPolicy.from_env({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_cache": "no"}, "prefix_cache must be True or False, not 'no'"),
        ({"chunked_prefill": None}, "chunked_prefill must be True or False, not None"),
        ({"cuda_graph": 1}, "cuda_graph must be True, False or None, not 1"),
        ({"pad_head": "on"}, "pad_head must be True, False or None, not 'on'"),
    ],
    ids=str,
)
def test_engine_switches_are_validated(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("prompt_rows", "with_graphs", "without_graphs"), [(None, 128, 0), (0, 0, 0), (30, 30, 30)]
)
def test_default_of_prompt_rows_depends_on_graphs(
    prompt_rows: int | None, with_graphs: int, without_graphs: int
) -> None:
    config = EngineConfig(prompt_rows=prompt_rows)
    assert config.num_prompt_rows(captured=True) == with_graphs
    assert config.num_prompt_rows(captured=False) == without_graphs


@pytest.mark.parametrize(
    ("billions", "tokens"), [(0.1, 8192), (1.24, 8192), (1.7, 4096), (3.2, 2048), (8.0, 2048)]
)
def test_prompt_tokens_of_a_step_follow_the_model_on_a_gpu(billions: float, tokens: int) -> None:
    config, weights = EngineConfig(), round(billions * 1e9)
    assert config.for_model("cuda", weights).max_prompt_tokens == tokens
    assert config.for_model("cpu", weights).max_prompt_tokens == 2048
    ranks = EngineConfig(tensor_parallel_size=2)
    assert ranks.for_model("cuda", weights).max_prompt_tokens == max(4096, tokens)
    chosen = EngineConfig(prefill_max_tokens=300)
    assert chosen.for_model("cuda", weights).max_prompt_tokens == 300
