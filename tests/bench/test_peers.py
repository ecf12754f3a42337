"""Other engines in benchmarks: equal work, or the reason why there is no result."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from roseinfer import LLM, ConfigError, SamplingParams, tiny_gpt2
from roseinfer.bench import peers
from roseinfer.bench.__main__ import main as bench
from roseinfer.bench.cases import PEERS, validate_peers
from roseinfer.bench.command import benchmark_scheduler
from roseinfer.bench.driver import MemoryFloor
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.peers import PeerJob, PeerRow, measure_peer, run_in_subprocess
from tests.bench.sleeper import start_sleeper
from tests.bench.test_serving_bench import ONCE, SMALL

TINY = ModelSource("tiny", random_weights=False, device="cpu", dtype=None)
JOB = PeerJob(TINY, [[1, 2, 3], [4, 5, 6, 7], [8, 9]], 4, 2, warmup_runs=0, repeat_runs=1)


def test_all_peers_are_selected_by_default() -> None:
    assert validate_peers(None) == ()
    assert validate_peers([]) == tuple(PEERS)
    assert validate_peers(["vllm"]) == ("vllm",)
    with pytest.raises(ConfigError, match=r"--peers other: unknown; use .*vllm"):
        validate_peers(["vllm", "other"])


def test_peer_is_measured() -> None:
    row = measure_peer("transformers-static", JOB, 1e-3)
    assert row.system == "transformers-static"
    assert row.version is not None
    assert row.total_s is not None
    assert row.completion_tok_per_s == pytest.approx(3 * 4 / row.total_s)
    assert row.not_available is None


class StubVllm(ModuleType):
    """The used part of vLLM, implemented by this project's engine."""

    class SamplingParams:
        def __init__(self, **options: Any) -> None:
            assert options == {
                "temperature": 0.0,
                "ignore_eos": True,
                "max_tokens": 4,
                "detokenize": False,
            }

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert options["max_num_seqs"] == JOB.max_batch_size
            assert options["max_model_len"] == 4 + 4
            assert not options["enable_prefix_caching"], (
                "expected no prefix cache: every run has the same prompts"
            )
            dtype = None if options["dtype"] == "auto" else options["dtype"]
            self._llm = LLM(options["model"], device="cpu", dtype=dtype)

        def generate(self, prompts: Any, params: object, use_tqdm: bool) -> list[Any]:
            assert isinstance(params, StubVllm.SamplingParams)
            assert not use_tqdm
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            greedy = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
            return [SimpleNamespace(outputs=[each]) for each in self._llm.generate(ids, greedy)]


class StubSglang(ModuleType):
    """The used part of SGLang, implemented by this project's engine."""

    class Engine:
        def __init__(self, **options: Any) -> None:
            assert options["max_running_requests"] == JOB.max_batch_size
            assert options["skip_tokenizer_init"]
            assert options["disable_radix_cache"]
            dtype = None if options["dtype"] == "auto" else options["dtype"]
            self._llm = LLM(options["model_path"], device="cpu", dtype=dtype)

        def generate(self, *, input_ids: Any, sampling_params: Any) -> list[dict[str, Any]]:
            expected = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4}
            assert sampling_params == expected
            greedy = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
            outputs = self._llm.generate(input_ids, greedy)
            return [{"output_ids": each.token_ids} for each in outputs]


@pytest.mark.parametrize("random_weights", [False, True])
@pytest.mark.parametrize(("name", "stub"), [("vllm", StubVllm), ("sglang", StubSglang)])
def test_peer_gets_prompts_and_options(
    name: str, stub: type[ModuleType], random_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub replaces the peer, which is not installed where tests run."""
    monkeypatch.setitem(sys.modules, name, stub(name))
    source = replace(TINY, random_weights=random_weights)
    if random_weights:
        monkeypatch.setattr(ModelSource, "network", lambda _source: tiny_gpt2().model)
    assert peers.PEER_SETUPS[name](replace(JOB, source=source))(4) == 3 * 4


def test_peer_completes_padded_prompts_as_roseinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts padded to one width have the same completions as in roseinfer."""
    completions: list[list[int]] = []
    network = TINY.network()
    generate = network.generate

    def recording_generate(*args: Any, **kwargs: Any) -> Any:
        tokens = generate(*args, **kwargs)
        completions.extend(row[-4:] for row in tokens.tolist())
        return tokens

    monkeypatch.setattr(network, "generate", recording_generate)
    monkeypatch.setattr(ModelSource, "network", lambda _source: network)
    assert peers.transformers_static(JOB)(4) == 12
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    ours = LLM("tiny", device="cpu").generate(JOB.prompts, greedy)
    assert completions == [output.token_ids for output in ours]


def test_peer_with_too_few_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        peers.PEER_SETUPS, "transformers-static", lambda _job: lambda new_tokens: new_tokens
    )
    with pytest.raises(RuntimeError, match="expected 12 tokens, actual 4"):
        measure_peer("transformers-static", JOB, 1.0)


def timed(job: PeerJob, begin_s: float, token_s: float, mp: pytest.MonkeyPatch) -> PeerRow:
    """Return the row of a system that takes ``begin_s``, and ``token_s`` for every new token."""
    seconds = lambda _generate, new, _job: begin_s + token_s * new  # noqa: E731
    mp.setattr(peers, "_seconds", seconds)
    return peers.measure("it", "1", lambda new: new, job, floor_ms=500.0)


def test_step_time_excludes_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches are served one after the other."""
    row = timed(JOB, 100.0, 2.0, monkeypatch)
    assert (row.total_s, row.prefill_ms) == (108.0, 102e3)
    assert row.completion_tok_per_s == 3 * 4 / 108
    assert row.ms_per_step == pytest.approx(1000.0)
    assert row.floor_ratio == pytest.approx(2.0)


def test_step_time_below_noise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    row = timed(JOB, 100.0, -1.0, monkeypatch)
    assert (row.ms_per_step, row.floor_ratio) == (None, None)
    one = timed(replace(JOB, max_new_tokens=1), 100.0, 2.0, monkeypatch)
    assert (one.total_s, one.prefill_ms, one.ms_per_step) == (102.0, 102e3, None)


def test_floor_is_for_the_mean_context_of_a_batch() -> None:
    """Prompts of 9 tokens in sum and half of their 12 new ones, in two batches."""
    floor = MemoryFloor(weight_bytes=1000, token_bytes=10, bandwidth=1e6)
    assert JOB.floor_ms(floor) == pytest.approx((1000 + 10 * round((9 + 6) / 2)) / 1e3)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_peer_is_listed_after_roseinfer(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    arguments = ["--no-stop-on-eos", "--mode", "offline", "--peers", "vllm", "--json", str(file)]
    assert benchmark_scheduler([*SMALL, *ONCE, *arguments]) == 0
    tables = json.loads(file.read_text())["tables"]
    ours, vllm = tables["peers"]
    assert ours["system"] == "roseinfer, offline"
    assert ours["total_s"] == tables["throughput"][0]["total_s"]
    assert vllm["system"] == "vllm"
    assert vllm["total_s"] is None
    assert vllm["not_available"] == "not installed: pip install vllm"
    step_ms, floor_ms = ours["ms_per_step"], ours["ms_per_step"] / ours["floor_ratio"]
    assert 0 < floor_ms < step_ms
    assert 0 < ours["prefill_ms"] < ours["total_s"] * 1e3


RUN = ["peers", "--hf-model-id", "tiny", "--device", "cpu", "--batch", "2", *ONCE]
RUN += ["--prompt-tokens", "5", "--max-new-tokens", "12"]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_peers_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peers.json"
    assert bench([*RUN, "--peers", "sglang", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    ours, sglang = document["tables"]["peers"]
    assert ours["system"] == "roseinfer"
    assert ours["completion_tok_per_s"] == pytest.approx(2 * 12 / ours["total_s"])
    assert 0 < ours["prefill_ms"] < ours["total_s"] * 1e3
    assert ours["floor_ratio"] == ours["ms_per_step"] / document["facts"]["floor_ms"]
    assert sglang["not_available"] == "not installed: pip install sglang"
    printed, progress = capsys.readouterr()
    assert "prefill ms" in printed
    assert "- sglang: not installed: pip install sglang" in printed
    assert f"roseinfer: prefill {ours['prefill_ms']:.1f} ms, a step " in progress
    assert "sglang: not installed" in progress, "expected each result as soon as it is known"


@pytest.mark.parametrize(("arguments", "expected"), [([], PEERS), (["--peers", "vllm"], ("vllm",))])
def test_peers_command_runs_all_peers_by_default(
    arguments: list[str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def record(names: tuple[str, ...], *_: object) -> list[PeerRow]:
        calls.append(names)
        return []

    monkeypatch.setattr(peers, "measure_peers", record)
    assert bench([*RUN, *arguments]) == 0
    assert calls == [expected]


def test_slow_peer_times_out() -> None:
    result = run_in_subprocess(measure_peer, "vllm", JOB, 1.0, time_limit_s=0.01)
    assert result == "timed out after 0.01 s"


@pytest.mark.slow
def test_peer_that_exits_is_reported() -> None:
    assert (
        run_in_subprocess(os._exit, 3, time_limit_s=600)
        == "exit status 3, without an error message"
    )


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_processes_of_a_peer_end_with_it(
    wait: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Holds for a peer that ends by itself, and for one that is killed."""
    for limit_s in (4.0, 16.0, 60.0) if wait else (60.0,):  # a busy machine starts it late
        result = run_in_subprocess(start_sleeper, str(tmp_path), wait, time_limit_s=limit_s)
        assert result == (f"timed out after {limit_s:g} s" if wait else "done")
        if (tmp_path / "pid").exists():
            break
    assert not _is_running(int((tmp_path / "pid").read_text()))
    assert not Path((tmp_path / "temporary").read_text()).exists()
    assert capfd.readouterr().out == "", "expected its output to be discarded"


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.01)
    return True
