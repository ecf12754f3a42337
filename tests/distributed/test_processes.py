"""Rank processes: started by the leader or by torchrun, and ended in any order."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import (
    LLM,
    AsyncLLM,
    EnginePath,
    EngineStopped,
    Guide,
    RanksFailed,
    SamplingParams,
)
from roseinfer.cli.model_options import add_model_options, add_settings, load_llm
from roseinfer.config import EngineConfig
from roseinfer.distributed import processes
from roseinfer.distributed.processes import prestarted_ranks
from tests import warm_process
from tests.distributed.followers import run_ranks_in_threads
from tests.engine.continuations import TEXTS, greedy, transformers_continuation
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "kv_cache_tokens": 2000,
}
_SECONDS = 5.0
"""Seconds until the other ranks end after one died."""
_STREAMS_S = 10.0
"""Seconds until all streams have ended, even if other tests compete for the cores."""
LONG = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llms() -> Iterator[list[LLM]]:
    """Yield a list of engines, whose ranks must end afterwards."""
    started: list[LLM] = []
    yield started
    for llm in started:
        assert llm.ranks is not None
        llm.ranks.rank_connections.close()
        for process in llm.ranks.rank_connections.child_processes:
            process.wait(_SECONDS)


@pytest.fixture
def llm(llms: list[LLM]) -> LLM:
    """Return an engine with live ranks: that of the previous test, unless it killed one."""
    if not llms or not is_running(other_process(llms[-1])):
        llms.append(LLM("tiny", tensor_parallel_size=2, resident_decode=True, **SIZES))
    return llms[-1]


def other_process(llm: LLM) -> int:
    assert llm.ranks is not None
    (process,) = llm.ranks.rank_connections.child_processes
    return process.pid


def test_completions_with_guides_match_one_process(llm: LLM) -> None:
    """Only the leader knows them, and sends the sampled tokens to the others."""
    params = [
        SamplingParams(1.0, seed=function, max_new_tokens=12, guide=guide)
        for function, guide in enumerate(
            [Guide(regex="[0-9]{5}"), Guide(choice=("yes", "no")), None]
        )
    ]
    outputs = llm.generate(TEXTS[:3], params, progress=False)
    alone = LLM("tiny", resident_decode=False, **SIZES).generate(TEXTS[:3], params, progress=False)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]
    assert str(outputs[0].text).isdigit()
    assert outputs[1].text in ("yes", "no")
    assert llm.engine.path_counts[EnginePath.GUIDED] > 0


def test_streams_end_when_a_rank_is_killed(llm: LLM) -> None:
    outputs = llm.generate(TEXTS, greedy(), progress=False)
    for prompt, output in zip(TEXTS, outputs, strict=True):
        assert output.token_ids == transformers_continuation("cpu", prompt, 16)
    served, kill_times = AsyncLLM(llm), list[float]()

    async def read(prompt: str) -> tuple[str, float]:
        """Return why the stream ended, and how long after the kill."""
        try:
            async for update in served.stream(prompt, LONG):
                if len(update.request.token_ids) == 20 and prompt == TEXTS[0]:
                    os.kill(other_process(llm), signal.SIGKILL)
                    kill_times.append(time.monotonic())
        except EngineStopped as error:
            return str(error), time.monotonic() - kill_times[0]
        return "the completion is whole", 0.0

    async def main() -> list[tuple[str, float]]:
        streams = [asyncio.wait_for(read(prompt), 60) for prompt in TEXTS]
        return [*await asyncio.gather(*streams), await asyncio.wait_for(read("later"), 5)]

    ends = asyncio.run(main())
    assert len(ends) == len(TEXTS) + 1
    assert all("rank 1 has ended" in why and after < _STREAMS_S for why, after in ends), ends
    served.close()
    with pytest.raises(RanksFailed, match="rank 1 has ended"):
        llm.generate(TEXTS, greedy(), progress=False)


def test_idle_engine_detects_an_ended_rank(llm: LLM) -> None:
    served = AsyncLLM(llm)

    async def main() -> None:
        assert (await served.generate(TEXTS[1], greedy(3))).finish_reason == "length"
        os.kill(other_process(llm), signal.SIGKILL)
        deadline = time.monotonic() + _SECONDS
        while not served.closed and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    asyncio.run(main())
    assert served.closed


_BROKEN = """
import sys
from pathlib import Path
from roseinfer.distributed import follower

def break_down(own, order):
    raise MemoryError("no room for activations")

follower.Follower._execute = break_down
follower.run_follower(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


def test_failed_rank_reports_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_rank(folder: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", _BROKEN, str(folder), str(rank), str(size)])

    monkeypatch.setattr(processes, "start_rank", start_rank)
    llm = LLM("tiny", tensor_parallel_size=2, **SIZES)
    for _ in range(2):
        with pytest.raises(RanksFailed, match="rank 1 failed: MemoryError: no room for activa"):
            llm.generate(TEXTS, greedy(), progress=False)


_EXIT_EARLY = """
import os, sys
from pathlib import Path
from roseinfer.distributed import follower

setattr(follower, sys.argv[4], lambda *args, **kwargs: os._exit(3))
follower.run_follower(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("rank_device", "rank 1 cannot start: it has ended"),
        ("FollowingRank", "rank 1 has ended"),
        ("load", "rank 1 has ended"),
    ],
)
def test_rank_ending_before_the_model_is_loaded_is_reported(
    function: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_rank(folder: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
        where = [str(folder), str(rank), str(size), function]
        return subprocess.Popen([sys.executable, "-c", _EXIT_EARLY, *where])

    monkeypatch.setattr(processes, "start_rank", start_rank)
    with pytest.raises(RanksFailed, match=why):
        LLM("tiny", tensor_parallel_size=2, **SIZES)


_LEADER = """
import os, sys, time
from roseinfer import LLM
llm = LLM("tiny", device="cpu", tensor_parallel_size=2, kv_cache_tokens=400)
print(llm.ranks.rank_connections.child_processes[0].pid, flush=True)
os._exit(9)
"""


def test_ranks_end_with_a_killed_leader() -> None:
    process = warm_process.run(["-c", _LEADER], cwd=ROOT, environment=os.environ, timeout=120)
    assert process.returncode == 9, process.stderr
    deadline = time.monotonic() + _SECONDS
    while is_running(int(process.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(process.stdout))


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


_DROP_RANKS = """
from roseinfer import LLM
llm = LLM("tiny", device="cpu", tensor_parallel_size=2, kv_cache_tokens=400)
del llm
"""


def test_process_exits_after_dropping_its_ranks() -> None:
    """This needs a new process, since ``warm_process`` does not shut down its interpreter."""
    command = [sys.executable, "-c", _DROP_RANKS]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")


def test_torchrun_starts_the_ranks() -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    launcher += ["--standalone", sys.executable, "-m", "roseinfer", "generate"]
    command = ["--prompt", TEXTS[0], "--json", "--max-new-tokens", "16", "--device", "cpu"]
    command += ["--tensor-parallel-size", "2"]
    process = warm_process.run([*launcher, *command], cwd=ROOT, environment=os.environ, timeout=120)
    assert process.returncode == 0, process.stderr
    (line,) = process.stdout.splitlines()
    assert json.loads(line)["token_ids"] == transformers_continuation("cpu", TEXTS[0], 16)


def test_ranks_are_started_before_the_leader_imports_torch() -> None:
    """They import it meanwhile, and end if no leader connects."""
    code = """
import subprocess, sys
from roseinfer.cli.model_options import add_model_options, add_settings, load_llm
from roseinfer.distributed import processes as rank_processes
from roseinfer.distributed.processes import prestarted_ranks

with prestarted_ranks(3):
    assert "torch" not in sys.modules
    (meeting,) = rank_processes._prestarted.values()
    assert [process.poll() for process in meeting.child_processes] == [None, None]
assert [process.returncode for process in meeting.child_processes] == [-9, -9]
assert not meeting.folder.exists() and not rank_processes._prestarted
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_too_many_ranks_for_a_host_are_not_prestarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the command would start them all, only to report that there are fewer GPUs."""
    monkeypatch.setattr(processes, "start_rank", None)
    with prestarted_ranks(64):
        assert not processes._prestarted
    with pytest.raises(TypeError), prestarted_ranks(8):
        pytest.fail("they were started")


@pytest.mark.parametrize("begin", [prestarted_ranks, processes.take_rendezvous])
def test_ranks_end_if_one_cannot_be_started(
    begin: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    children: list[subprocess.Popen[bytes]] = []

    def start_rank(folder: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
        folders.append(folder)
        if rank == size - 1:
            raise BlockingIOError("no more processes")
        children.append(subprocess.Popen(["sleep", "60"]))
        return children[-1]

    monkeypatch.setattr(processes, "start_rank", start_rank)
    with pytest.raises(BlockingIOError), begin(4):
        pytest.fail("they were started")
    assert [process.returncode for process in children] == [-9, -9]
    assert not folders[0].exists()
    assert not processes._prestarted


def test_command_leads_its_prestarted_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[processes.Rendezvous] = []
    open_rendezvous = processes.Rendezvous.open

    def recorded_open() -> processes.Rendezvous:
        opened.append(open_rendezvous())
        return opened[-1]

    ranks = run_ranks_in_threads(monkeypatch)
    monkeypatch.setattr(processes.Rendezvous, "open", recorded_open)
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    add_settings(parser, EngineConfig)
    args = parser.parse_args(["--device", "cpu", "--tensor-parallel-size", "2"])
    llm = load_llm(args, "test")
    assert llm.ranks is not None
    (meeting,) = opened
    assert [*llm.ranks.rank_connections.child_processes] == meeting.child_processes
    assert len(ranks) == 1
    (output,) = llm.generate([TEXTS[1]], greedy(2), progress=False)
    assert len(output.token_ids) == 2
