"""The ``ROSELLM_TRITON_KV_APPEND*`` variables, which apply where no policy is passed."""

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

    def appended(batches, **options):
        kv = KVBlockManager(1, 1, 2, 16, 16, "cpu", torch.float32, **options)
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


@pytest.mark.slow
def test_variables_apply_unless_a_policy_is_passed() -> None:
    variables = {SWITCH: "on", MIN_BATCH: "3", FULL_BATCH: "5"}
    engine, with_policy, manager, manager_with_policy = json.loads(
        run_python(WRITES, interpret=True, warm=True, **variables)
    )
    assert engine == ["torch_vector", "triton_identity_pos"]
    assert {path.split("_")[0] for path in with_policy} == {"torch"}
    assert manager == ["torch_scalar", "triton_full_batch", "triton_identity_pos"]
    assert manager_with_policy == ["triton_identity_pos"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_rejects_an_invalid_variable_first(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is rejected before the model is searched, which does not exist."""
    monkeypatch.setenv(MIN_BATCH, "some")
    main, arguments = COMMANDS[command]
    try:
        status: object = main(arguments)
    except SystemExit as exit_error:
        status = exit_error.code
    assert status == 2
    stderr = capsys.readouterr().err
    assert f"{MIN_BATCH}='some': expected a whole number" in stderr
    assert "no/such-model" not in stderr


@pytest.mark.parametrize(
    "build",
    [
        lambda: KVBlockManager(1, 1, 2, 4, 4, "cpu", torch.float32),
        EngineConfig,
        lambda: LLM("no/such-model"),
    ],
    ids=["manager", "config", "engine"],
)
def test_invalid_variable_is_named_in_the_error(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "perhaps")
    with pytest.raises(ConfigError, match=f"^{SWITCH}='perhaps': expected on or off"):
        build()


def test_variables_are_not_read_with_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "perhaps")
    policy = AppendPolicy(triton=False)
    assert EngineConfig(append_policy=policy).policy_for("cuda") is policy
    kv = KVBlockManager(1, 1, 2, 4, 4, "cpu", torch.float32, policy)
    assert kv.policy is policy


@pytest.mark.parametrize(
    ("switch", "on_gpu", "on_cpu"), [(None, True, False), ("on", True, True), ("0", False, False)]
)
def test_switch_overrides_the_default_of_the_device(
    switch: str | None, on_gpu: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    config = EngineConfig()
    assert config.policy_for("cuda").triton == on_gpu
    assert config.policy_for("cpu").triton == on_cpu


def test_bench_append_skips_disabled_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "triton_skip_reason", lambda _: "")
    assert not any(skip_reasons(4).values())
    monkeypatch.setenv(SWITCH, "off")
    assert skip_reasons(4) == {
        path: f"{SWITCH} is off" if path.needs_triton else "" for path in POLICIES
    }


def test_bench_append_skips_batches_below_the_thresholds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(append, "triton_skip_reason", lambda _: "")
    monkeypatch.setenv(MIN_BATCH, "3")
    monkeypatch.setenv(FULL_BATCH, "5")
    full_batch = Path.TRITON_FULL_BATCH
    others = {Path.TRITON_IDENTITY_POS, Path.TRITON_GATHER}
    for batch, missing in ((2, {full_batch, *others}), (4, {full_batch}), (5, set())):
        reasons = skip_reasons(batch)
        assert {path for path, reason in reasons.items() if reason} == missing
    assert skip_reasons(4)[full_batch] == f"batch 4: {FULL_BATCH} requires 5 tokens or more"


def skip_reasons(batch: int) -> dict[Path, str]:
    device = torch.device("cpu")
    return {path: append.append_skip_reason(path, batch, device) for path in POLICIES}
