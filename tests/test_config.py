"""Settings: defaults, the environment variables behind them, what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from roseinfer import AppendPolicy, ConfigError, EngineConfig

SWITCH = "ROSELLM_TRITON_KV_APPEND"
MIN_BATCH = "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"
FULL_BATCH = "ROSELLM_TRITON_KV_APPEND_FULL_BATCH_MIN_BATCH"


def test_an_empty_environment_gives_the_defaults() -> None:
    assert AppendPolicy.from_env({}) == AppendPolicy()


def test_by_default_everything_is_on_from_the_first_token() -> None:
    policy = AppendPolicy()
    switches = [f.name for f in fields(policy) if f.type == "bool"]
    assert len(switches) == 6
    assert all(getattr(policy, name) for name in switches)
    assert policy.triton_min_batch == policy.full_batch_threshold == 1


@pytest.mark.parametrize("name", [field.name for field in fields(AppendPolicy)])
def test_a_policy_does_not_change(name: str) -> None:
    policy = AppendPolicy()
    with pytest.raises(FrozenInstanceError):
        setattr(policy, name, getattr(policy, name))


def test_policies_compare_and_hash_by_what_they_say() -> None:
    assert len({AppendPolicy(), AppendPolicy(triton=True), AppendPolicy(triton=False)}) == 2


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("on", True), ("1", True), ("true", True), ("yes", True), (" On\n", True),
        ("off", False), ("0", False), ("false", False), ("no", False), ("OFF", False),
    ],
)  # fmt: skip
def test_the_switch(text: str, on: bool) -> None:
    assert AppendPolicy.from_env({SWITCH: text}) == AppendPolicy(triton=on)


@pytest.mark.parametrize("number", [0, 1, 8, 4096])
def test_the_first_threshold_is_the_second_ones_default(number: int) -> None:
    policy = AppendPolicy.from_env({MIN_BATCH: str(number)})
    assert policy == AppendPolicy(triton_min_batch=number)
    assert policy.full_batch_threshold == number


@pytest.mark.parametrize("number", [0, 3])
def test_the_full_batch_threshold_alone(number: int) -> None:
    policy = AppendPolicy.from_env({FULL_BATCH: str(number)})
    assert (policy.triton_min_batch, policy.full_batch_threshold) == (1, number)


def test_both_thresholds() -> None:
    policy = AppendPolicy.from_env({MIN_BATCH: "8", FULL_BATCH: "2"})
    assert (policy.triton_min_batch, policy.full_batch_threshold) == (8, 2)


@pytest.mark.parametrize("variable", [MIN_BATCH, FULL_BATCH])
@pytest.mark.parametrize("text", ["eight", "8.0", "1e3", "-1", "", " ", "0x10", "8 tokens"])
def test_a_threshold_that_is_no_whole_number(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppendPolicy.from_env({variable: text})
    message = str(caught.value)
    assert message.startswith(f"{variable}={text!r}")
    assert "whole number" in message


@pytest.mark.parametrize("text", ["maybe", "", "2", "enabled"])
def test_a_switch_that_is_neither_on_nor_off(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppendPolicy.from_env({SWITCH: text})
    message = str(caught.value)
    assert message.startswith(f"{SWITCH}={text!r}")
    assert "on or off" in message


@pytest.mark.parametrize("name", ["triton_min_batch", "triton_full_batch_min_batch"])
@pytest.mark.parametrize("value", [-1, 1.0, "8", True])
def test_a_threshold_from_code_is_checked_too(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"AppendPolicy\.{name} must be .*, not {value!r}"):
        AppendPolicy(**{name: value})


def test_no_first_threshold_is_an_error() -> None:
    none: Any = None
    with pytest.raises(ConfigError, match="triton_min_batch must be a whole number"):
        AppendPolicy(triton_min_batch=none)


def test_the_process_environment_is_read_when_asked_and_only_then(
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
    ("wrong", "wanted"),
    [
        ({"prefix_cache": "no"}, "prefix_cache must be True or False, not 'no'"),
        ({"chunked_prefill": None}, "chunked_prefill must be True or False, not None"),
        ({"cuda_graph": 1}, "cuda_graph must be True, False or None, not 1"),
        ({"pad_head": "on"}, "pad_head must be True, False or None, not 'on'"),
    ],
    ids=str,
)
def test_a_switch_of_the_engine_is_checked_too(wrong: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        EngineConfig(**wrong)


@pytest.mark.parametrize(("given", "captured", "else_"), [(None, 128, 0), (0, 0, 0), (30, 30, 30)])
def test_short_prompts_have_rows_where_steps_are_graphs_unless_told(
    given: int | None, captured: int, else_: int
) -> None:
    config = EngineConfig(prompt_rows=given)
    assert config.num_prompt_rows(captured=True) == captured
    assert config.num_prompt_rows(captured=False) == else_
