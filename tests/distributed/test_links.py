"""Connections of ranks: failures are reported whatever the callbacks do."""

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
    """Stand-in for a rank that the leader started."""

    def __init__(self) -> None:
        self.waited = threading.Event()

    def kill(self) -> None:
        """Do nothing: the connection ends."""

    def wait(self) -> None:
        self.waited.set()


class _BlockedConnections:
    """Connections to one rank, and a failure callback that blocks as NCCL's abort does on a GPU."""

    def __init__(self) -> None:
        own, self.other = Pipe()
        self.process = _Process()
        started: list[Any] = [self.process]
        self.rank_connections = RankConnections([own], started)
        self.blocked, self.release, self.notified = (threading.Event() for _ in range(3))
        self.rank_connections.on_failure += [self._wait, self.notified.set]

    def _wait(self) -> None:
        self.blocked.set()
        self.release.wait()


@pytest.fixture
def connections_to_rank() -> Iterator[_BlockedConnections]:
    connections = _BlockedConnections()
    yield connections
    connections.release.set()
    connections.other.close()
    assert connections.process.waited.wait(_SECONDS)


def test_failed_step_is_raised_at_once(connections_to_rank: _BlockedConnections) -> None:
    failures: list[RanksFailed] = []

    def mark_failed() -> None:
        failures.append(connections_to_rank.rank_connections.mark_failed(MemoryError("no room")))

    thread = threading.Thread(target=mark_failed, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    assert connections_to_rank.blocked.wait(_SECONDS)
    assert [str(failure) for failure in failures] == ["a step failed: MemoryError: no room"]


def test_end_of_a_rank_is_reported_to_all(connections_to_rank: _BlockedConnections) -> None:
    connections_to_rank.other.close()
    assert connections_to_rank.notified.wait(_SECONDS)
    assert connections_to_rank.process.waited.wait(_SECONDS)
    with pytest.raises(RanksFailed, match="rank 1 has ended"):
        connections_to_rank.rank_connections.require_alive()


def test_end_of_a_failed_rank_is_awaited(connections_to_rank: _BlockedConnections) -> None:
    connections_to_rank.other.send(RanksFailed("no room"))
    assert connections_to_rank.blocked.wait(_SECONDS)
    connections_to_rank.other.close()
    assert connections_to_rank.process.waited.wait(_SECONDS)
    with pytest.raises(RanksFailed, match="rank 1 failed: no room"):
        connections_to_rank.rank_connections.require_alive()


class _Event:
    """Stand-in for a CUDA event that has completed at the second query."""

    num_queries = 0

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        _Event.num_queries += 1
        return _Event.num_queries > 1


def test_released_rank_finishes_its_work_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank whose leader is gone waits for nothing, and no rank waits for long."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "num_queries", 0)
    leader, link = Pipe()
    rank = FollowingRank.__new__(FollowingRank)
    rank._leader, rank.device = link, torch.device("cuda", 1)
    leader.send_bytes(pickle.dumps(None))
    assert rank.receive_command() is None
    assert _Event.num_queries == 2
    monkeypatch.setattr(ranks, "_FINISH_S", 0.05)
    monkeypatch.setattr(_Event, "query", lambda _: False)
    leader.send_bytes(pickle.dumps(None))
    assert rank.receive_command() is None
    leader.close()
    assert rank.receive_command() is None
    assert _Event.num_queries == 2
