"""Peers do the same work, or are listed with the reason why they did not."""

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
from roseinfer.bench.arguments import PEERS, peers_named
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.serving import peers
from roseinfer.bench.serving.commands import benchmark_scheduler
from roseinfer.bench.serving.isolation import in_process
from roseinfer.bench.serving.peers import PeerJob
from tests.bench.sleeper import begin_and
from tests.bench.test_serving_bench import ONCE, SMALL

TINY = ModelSource("tiny", random_weights=False, device="cpu", dtype=None)
JOB = PeerJob(TINY, [[1, 2, 3], [4, 5, 6, 7], [8, 9]], 4, 2, warmup_runs=0, repeat_runs=1)


def test_all_peers_unless_some_are_named() -> None:
    assert peers_named(None) == ()
    assert peers_named([]) == tuple(PEERS)
    assert peers_named(["vllm"]) == ("vllm",)
    with pytest.raises(ConfigError, match=r"--peers nobody: there are .*vllm"):
        peers_named(["vllm", "nobody"])


def test_a_peer_does_the_work() -> None:
    row = peers.measure("transformers-static", JOB)
    assert row.system == "transformers-static"
    assert row.version is not None
    assert row.total_s is not None
    assert row.completion_tok_per_s == pytest.approx(3 * 4 / row.total_s)
    assert row.not_available is None


class StubVllm(ModuleType):
    """The part of vLLM that is used, with the engine of this project behind it."""

    class SamplingParams:
        def __init__(self, **how: Any) -> None:
            assert how == {
                "temperature": 0.0,
                "ignore_eos": True,
                "max_tokens": 4,
                "detokenize": False,
            }

    class LLM:
        def __init__(self, **how: Any) -> None:
            assert how["max_num_seqs"] == JOB.max_batch_size
            assert how["max_model_len"] == 4 + 4
            dtype = None if how["dtype"] == "auto" else how["dtype"]
            self._llm = LLM(how["model"], device="cpu", dtype=dtype)

        def generate(self, prompts: Any, params: object, use_tqdm: bool) -> list[Any]:
            assert isinstance(params, StubVllm.SamplingParams)
            assert not use_tqdm
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            greedy = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
            return [SimpleNamespace(outputs=[each]) for each in self._llm.generate(ids, greedy)]


@pytest.mark.parametrize("random_weights", [False, True])
def test_vllm_is_given_the_work(random_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub stands in for vLLM, which is not installed where tests run."""
    monkeypatch.setitem(sys.modules, "vllm", StubVllm("vllm"))
    source = replace(TINY, random_weights=random_weights)
    if random_weights:
        monkeypatch.setattr(ModelSource, "network", lambda _source: tiny_gpt2().model)
    assert peers.vllm(replace(JOB, source=source))(4) == 3 * 4


def test_a_peers_prompts_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are padded to one width must be continued as our engine continues them."""
    made: list[list[int]] = []
    network = TINY.network()
    generate = network.generate

    def note(*args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        made.extend(row[-4:] for row in found.tolist())
        return found

    monkeypatch.setattr(network, "generate", note)
    monkeypatch.setattr(ModelSource, "network", lambda _source: network)
    assert peers.transformers_static(JOB)(4) == 12
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    ours = LLM("tiny", device="cpu").generate(JOB.prompts, greedy)
    assert made == [output.token_ids for output in ours]


def test_less_work_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        peers._SET_UP, "transformers-static", lambda _job: lambda new_tokens: new_tokens
    )
    with pytest.raises(RuntimeError, match="it made 4 tokens of 12"):
        peers.measure("transformers-static", JOB)


def test_the_time_of_a_step_leaves_the_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 100 s and 2 s a token, and serves two batches one after the other."""
    monkeypatch.setattr(peers, "_seconds", lambda _generate, new, _job: 100.0 + 2.0 * new)
    assert peers._ms_per_step(lambda new: new, 108.0, JOB) == pytest.approx(1000.0)
    assert peers._ms_per_step(lambda new: new, 101.0, JOB) is None
    assert peers._ms_per_step(lambda new: new, 9.0, replace(JOB, max_new_tokens=1)) is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_peer_that_is_missing_is_named_beside_ours(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    words = ["--no-stop-on-eos", "--mode", "offline", "--peers", "vllm", "--json", str(file)]
    assert benchmark_scheduler([*SMALL, *ONCE, *words]) == 0
    tables = json.loads(file.read_text())["tables"]
    ours, vllm = tables["peers"]
    assert ours["system"] == "roseinfer, offline"
    assert ours["total_s"] == tables["throughput"][0]["total_s"]
    assert vllm["system"] == "vllm"
    assert vllm["total_s"] is None
    assert "No module named 'vllm'" in vllm["not_available"]


def test_a_peer_that_takes_too_long_is_named() -> None:
    found = in_process(peers.measure, "vllm", JOB, time_limit_s=0.01)
    assert found == "it took longer than 0.01 s"


def test_a_peer_that_dies_is_named() -> None:
    assert in_process(os._exit, 3, time_limit_s=60) == "exit status 3, and it said nothing"


@pytest.mark.parametrize("wait", [True, False])
def test_what_a_peer_started_ends_with_it(
    wait: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """This holds whether the peer ends by itself or is killed."""
    limit_s = 4.0 if wait else 60.0
    found = in_process(begin_and, str(tmp_path), wait, time_limit_s=limit_s)
    assert found == ("it took longer than 4 s" if wait else "done")
    assert not _runs(int((tmp_path / "pid").read_text()))
    assert not Path((tmp_path / "temporary").read_text()).exists()
    assert capfd.readouterr().out == "", "its output is thrown away"


def _runs(pid: int) -> bool:
    """Return whether such a process is still there and no zombie."""
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
