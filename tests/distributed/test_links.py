"""Links tell of a failure whatever the calls do that end the ranks' work."""

from __future__ import annotations

import pickle
import threading
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import RanksFailed
from roseinfer.distributed import ranks
from roseinfer.distributed.ranks import FollowingRank, RankConnections

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECONDS = 10.0


class _Process:
    """Stands for a rank that the leader has started."""

    def __init__(self) -> None:
        self.waited = threading.Event()

    def kill(self) -> None:
        """Do nothing: what ends is the link."""

    def wait(self) -> None:
        self.waited.set()


class _Waiting:
    """Links to one rank, and a call on failure that waits as NCCL's abort does on a GPU."""

    def __init__(self) -> None:
        own, self.other = Pipe()
        self.process = _Process()
        started: list[Any] = [self.process]
        self.rank_connections = RankConnections([own], started)
        self.begun, self.go_on, self.told = (threading.Event() for _ in range(3))
        self.rank_connections.on_failure += [self._wait, self.told.set]

    def _wait(self) -> None:
        self.begun.set()
        self.go_on.wait()


@pytest.fixture
def waiting() -> Iterator[_Waiting]:
    found = _Waiting()
    yield found
    found.go_on.set()
    found.other.close()
    assert found.process.waited.wait(_SECONDS)


def test_a_step_that_broke_off_raises_at_once(waiting: _Waiting) -> None:
    failures: list[RanksFailed] = []

    def mark_failed() -> None:
        failures.append(waiting.rank_connections.mark_failed(MemoryError("no room")))

    thread = threading.Thread(target=mark_failed, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    assert waiting.begun.wait(_SECONDS)
    assert [str(failure) for failure in failures] == ["a step failed: MemoryError: no room"]


def test_all_are_told_that_a_rank_has_ended(waiting: _Waiting) -> None:
    waiting.other.close()
    assert waiting.told.wait(_SECONDS)
    assert waiting.process.waited.wait(_SECONDS)
    with pytest.raises(RanksFailed, match="rank 1 has ended"):
        waiting.rank_connections.require_alive()


def test_the_end_of_a_rank_that_broke_down_is_waited_for(waiting: _Waiting) -> None:
    waiting.other.send(RanksFailed("no room"))
    assert waiting.begun.wait(_SECONDS)
    waiting.other.close()
    assert waiting.process.waited.wait(_SECONDS)
    with pytest.raises(RanksFailed, match="rank 1 failed: no room"):
        waiting.rank_connections.require_alive()


class _Event:
    """Stands for the end of what a GPU has begun, which comes when it is asked for twice."""

    asked = 0

    def record(self) -> None:
        """Do nothing: nothing is begun."""

    def query(self) -> bool:
        _Event.asked += 1
        return _Event.asked > 1


def test_a_rank_that_is_let_go_ends_what_the_leader_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose leader is gone waits for nothing, and no rank waits for long."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "asked", 0)
    leader, link = Pipe()
    rank = FollowingRank.__new__(FollowingRank)
    rank._leader, rank.device = link, torch.device("cuda", 1)
    leader.send_bytes(pickle.dumps(None))
    assert rank.receive_command() is None
    assert _Event.asked == 2
    monkeypatch.setattr(ranks, "_FINISH_S", 0.05)
    monkeypatch.setattr(_Event, "query", lambda _: False)
    leader.send_bytes(pickle.dumps(None))
    assert rank.receive_command() is None
    leader.close()
    assert rank.receive_command() is None
    assert _Event.asked == 2
