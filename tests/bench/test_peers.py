"""Other systems on the same work: measured where they can be, and else named with the reason."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from roseinfer import LLM, ConfigError, SamplingParams, tiny_gpt2
from roseinfer.bench.serving import peer_process, peers
from roseinfer.bench.serving.commands import benchmark_scheduler
from roseinfer.bench.serving.peers import PEERS, PeerJob, PeerRow
from tests.bench.test_serving_bench import ONCE, SMALL

TINY = {"name": "tiny", "random_weights": False, "device": "cpu", "dtype": None}
JOB = PeerJob(TINY, [[1, 2, 3], [4, 5, 6, 7], [8, 9]], 4, 2, warmup_runs=0, repeat_runs=1)


def test_all_peers_unless_some_are_named() -> None:
    assert peers.named(None) == ()
    assert peers.named([]) == PEERS == tuple(peer_process._BUILDERS)
    assert peers.named(["vllm"]) == ("vllm",)
    with pytest.raises(ConfigError, match=r"--peers nobody: there are .*vllm"):
        peers.named(["vllm", "nobody"])


def test_a_peer_does_the_work() -> None:
    row = peer_process.measure("transformers-static", JOB)
    assert row.system == "transformers-static"
    assert row.version is not None
    assert row.total_s is not None
    assert row.completion_tok_per_s == pytest.approx(3 * 4 / row.total_s)
    assert row.not_available is None


class StubVllm(ModuleType):
    """What is used of vLLM, with the engine of this project behind it."""

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
    """It is not installed where tests run: this is what is asked of it."""
    monkeypatch.setitem(sys.modules, "vllm", StubVllm("vllm"))
    source = {**TINY, "random_weights": random_weights}
    if random_weights:
        monkeypatch.setattr(peer_process, "_network", lambda _job: tiny_gpt2().model)
    assert peer_process.vllm(replace(JOB, source=source))(4) == 3 * 4


def test_a_peers_prompts_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to one width, they must go on as they do here."""
    made: list[list[int]] = []
    network = peer_process._network(JOB)
    generate = network.generate

    def note(*args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        made.extend(row[-4:] for row in found.tolist())
        return found

    monkeypatch.setattr(network, "generate", note)
    monkeypatch.setattr(peer_process, "_network", lambda _job: network)
    assert peer_process.transformers_static(JOB)(4) == 12
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    ours = LLM("tiny", device="cpu").generate(JOB.prompts, greedy)
    assert made == [output.token_ids for output in ours]


def test_less_work_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = (lambda _job: lambda new_tokens: new_tokens, "transformers")
    monkeypatch.setitem(peer_process._BUILDERS, "transformers-static", lazy)
    with pytest.raises(RuntimeError, match="it made 4 tokens of 12"):
        peer_process.measure("transformers-static", JOB)


def test_the_time_of_a_step_leaves_the_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that take 100 s and 2 s a token, for two batches one after the other."""
    monkeypatch.setattr(peer_process, "_seconds", lambda _generate, new, _job: 100.0 + 2.0 * new)
    assert peer_process._ms_per_step(lambda new: new, 108.0, JOB) == pytest.approx(1000.0)
    assert peer_process._ms_per_step(lambda new: new, 101.0, JOB) is None
    assert peer_process._ms_per_step(lambda new: new, 9.0, replace(JOB, max_new_tokens=1)) is None


def test_the_answer_is_left_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PeerRow("vllm", "1", 2.0, 3.0, None, None)
    asked, answered = tmp_path / "job.json", tmp_path / "row.json"
    asked.write_text(json.dumps(asdict(JOB)))
    folders: list[str] = []

    def measure(name: str, job: PeerJob) -> PeerRow:
        assert (name, job) == ("vllm", JOB)
        folders.append(tempfile.mkdtemp())
        return row

    monkeypatch.setattr(peer_process, "measure", measure)
    monkeypatch.setattr(tempfile, "tempdir", None)
    peer_process.main("vllm", asked, answered)
    assert PeerRow(**json.loads(answered.read_text())) == row
    assert folders[0].startswith(str(tmp_path))  # what it leaves there goes with the question


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
    row = peers.measure("vllm", JOB, time_limit_s=0.01)
    assert row == PeerRow("vllm", None, None, None, None, "it took longer than 0.01 s")


@pytest.mark.parametrize("limit_s", [60.0, 0.5])
def test_what_a_peer_started_ends_with_it(limit_s: float, tmp_path: Path) -> None:
    """Whether it ends by itself or is ended."""
    waits = limit_s < 1
    script = "import subprocess, sys\n"
    script += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    script += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    script += "child.wait()\n" if waits else "sys.exit(3)\n"
    status = peers._run([sys.executable, "-c", script], tmp_path / "stderr", limit_s)
    assert status == (None if waits else 3)
    child = int((tmp_path / "pid").read_text())
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """Whether such a process does more than wait for somebody to ask how it ended."""
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
