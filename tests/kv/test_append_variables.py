"""The ``ROSELLM_TRITON_KV_APPEND*`` variables, where no policy is given: end to end."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from roseinfer import (
    LLM,
    AppendPolicy,
    ConfigError,
    EngineConfig,
    KVBlockManager,
    Path,
    cli,
)
from roseinfer.bench import __main__ as bench
from roseinfer.bench import append
from roseinfer.bench.append import POLICIES
from roseinfer.bench.command import benchmark_streaming
from roseinfer.config import TRITON_FULL_BATCH_MIN_BATCH as FULL_BATCH
from roseinfer.config import TRITON_MIN_BATCH as MIN_BATCH
from roseinfer.config import TRITON_SWITCH as SWITCH
from tests.python_process import run_python

WRITES = """
    import json, torch
    from roseinfer import LLM, AppendPolicy, KVBlockManager

    def served(**config):
        llm = LLM("tiny", device="cpu", kv_cache_tokens=1024, **config)
        llm.generate(["four", "long prompt"], progress=False)
        return llm.engine.sequence_runner.kv

    def appended(batches, **given):
        kv = KVBlockManager(1, 1, 2, 16, 16, "cpu", torch.float32, **given)
        for batch in batches:
            kv.append_token_batch(0, [[] for _ in range(batch)], *torch.ones(2, batch, 1, 2))
        return kv

    caches = [served(), served(append_policy=AppendPolicy(triton=False)),
              appended([2, 4, 6]), appended([2, 4, 6], policy=AppendPolicy(scalar_position=False))]
    writes = ("torch_", "triton_")
    print(json.dumps([
        sorted(path.value for path, times in kv.path_counts.items()
               if times and path.value.startswith(writes)) for kv in caches]))
"""
COMMANDS = {
    "generate": (cli.main, ["generate", "--model", "no/such-model", "--prompt", "x"]),
    "streaming": (benchmark_streaming, ["--hf-model-id", "no/such-model"]),
    "append": (bench.main, ["append", "--device", "cpu", "--quick"]),
    "ladder": (bench.main, ["ladder", "--hf-model-id", "no/such-model"]),
}


def test_they_hold_for_an_engine_and_a_manager_and_a_policy_beats_them() -> None:
    variables = {SWITCH: "on", MIN_BATCH: "3", FULL_BATCH: "5"}
    engine, told, manager, own = json.loads(
        run_python(WRITES, interpret=True, warm=True, **variables)
    )
    assert engine == ["torch_vector", "triton_identity_pos"]
    assert {path.split("_")[0] for path in told} == {"torch"}
    assert manager == ["torch_scalar", "triton_full_batch", "triton_identity_pos"]
    assert own == ["triton_identity_pos"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_bad_one_at_once(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it looks for its model, which is not there."""
    monkeypatch.setenv(MIN_BATCH, "some")
    main, arguments = COMMANDS[command]
    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert f"{MIN_BATCH}='some': expected a whole number" in said
    assert "no/such-model" not in said


@pytest.mark.parametrize(
    "build",
    [
        lambda: KVBlockManager(1, 1, 2, 4, 4, "cpu", torch.float32),
        EngineConfig,
        lambda: LLM("no/such-model"),
    ],
    ids=["manager", "config", "engine"],
)
def test_a_bad_one_is_an_error_that_names_it(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "perhaps")
    with pytest.raises(ConfigError, match=f"^{SWITCH}='perhaps': expected on or off"):
        build()


def test_nobody_reads_them_where_a_policy_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "perhaps")
    policy = AppendPolicy(triton=False)
    assert EngineConfig(append_policy=policy).policy_for("cuda") is policy
    kv = KVBlockManager(1, 1, 2, 4, 4, "cpu", torch.float32, policy)
    assert kv.policy is policy


@pytest.mark.parametrize(
    ("switch", "on_gpu", "on_cpu"), [(None, True, False), ("on", True, True), ("0", False, False)]
)
def test_the_switch_beats_what_the_device_does_best(
    switch: str | None, on_gpu: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    config = EngineConfig()
    assert config.policy_for("cuda").triton == on_gpu
    assert config.policy_for("cpu").triton == on_cpu


def test_bench_append_leaves_out_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "triton_skip_reason", lambda _: "")
    assert not any(left_out(4).values())
    monkeypatch.setenv(SWITCH, "off")
    assert left_out(4) == {
        path: f"{SWITCH} is off" if path.needs_triton else "" for path in POLICIES
    }


def test_bench_append_leaves_out_batches_below_the_thresholds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(append, "triton_skip_reason", lambda _: "")
    monkeypatch.setenv(MIN_BATCH, "3")
    monkeypatch.setenv(FULL_BATCH, "5")
    full_batch = Path.TRITON_FULL_BATCH
    others = {Path.TRITON_IDENTITY_POS, Path.TRITON_GATHER}
    for batch, missing in ((2, {full_batch, *others}), (4, {full_batch}), (5, set())):
        reasons = left_out(batch)
        assert {path for path, reason in reasons.items() if reason} == missing
    assert left_out(4)[full_batch] == f"batch 4: {FULL_BATCH} requires 5 tokens or more"


def left_out(batch: int) -> dict[Path, str]:
    device = torch.device("cpu")
    return {path: append.append_skip_reason(path, batch, device) for path in POLICIES}
