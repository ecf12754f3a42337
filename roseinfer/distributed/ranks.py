"""Ranks: the collectives of a tensor-parallel model, and the link between leader and followers.

Ranks compute the same steps, each with its share of the heads. The first one leads: it plans,
chooses tokens, and sends commands to the others.
"""

from __future__ import annotations

import _thread
import atexit
import os
import pickle
import threading
import time
import weakref
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions

from roseinfer.config import set_default_environment
from roseinfer.errors import RanksFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection
    from subprocess import Popen
    from typing import Self

    from torch import Tensor

    from roseinfer.kv.manager import StepBatch
    from roseinfer.kv.plan import AppendPlan
    from roseinfer.paths import EnginePath


# Commands that the leading rank sends to the others.
#
# The leader alone plans: commands contain its blocks, tables and tokens, so that ranks cannot
# disagree on them.


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """A command to copy blocks of a group of layers, all at once."""

    layer: int
    """First layer of the group."""
    source: list[int]
    target: list[int]

    @classmethod
    def of(cls, plan: AppendPlan) -> Self:
        return cls(plan.layer, plan.copy_from, plan.copy_to)


@dataclass(frozen=True, slots=True)
class Forward:
    """A command to run new tokens of some sequences through the model."""

    token_ids: list[int]
    positions: list[int]
    rows: list[int] | None
    """Rows whose logits are computed; None for all."""
    plans: dict[int, AppendPlan]
    """Append plan of the new tokens, by group of layers."""
    block_lists: Sequence[Sequence[list[int]]]
    counts: Sequence[int]
    lengths: Sequence[int]
    num_decodes: int

    @classmethod
    def of(
        cls, batch: StepBatch, token_ids: list[int], positions: list[int], rows: list[int] | None
    ) -> Self:
        plans = {
            # Copies were sent before, as CopyBlocks.
            group: replace(plan, copy_from=[], copy_to=[], staged_indices=None)
            for group, plan in batch.plans.items()
        }
        lists, counts, lengths = batch.block_lists, batch.counts, batch.lengths
        return cls(token_ids, positions, rows, plans, lists, counts, lengths, batch.num_decodes)


@dataclass(frozen=True, slots=True)
class PutRows:
    """A command to replace whole rows."""

    path: EnginePath
    """Path of the steps over these rows."""
    flat: list[int]
    """Slot and numbers of each row, concatenated."""
    count: int


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """A command to replace single numbers in rows."""

    path: EnginePath
    places: list[int]
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class PutTokens:
    """A command to receive the newest tokens of some rows from the leader's GPU."""

    path: EnginePath
    slots: list[int]


@dataclass(frozen=True, slots=True)
class PutFirstTokens:
    """A command to set the newest tokens of the first rows."""

    path: EnginePath
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Decode:
    """A command to run a step over the first ``count`` rows."""

    path: EnginePath
    count: int
    kind: Any
    """``StepKind`` of the step; every rank has a graph of it."""


@dataclass(frozen=True, slots=True)
class ReportState:
    """A command to reply with a part of the rank's state: ``tables`` or ``caches``."""

    part: str


RowsCommand = PutRows | PutBlocks | PutTokens | PutFirstTokens
RankCommand = CopyBlocks | Forward | RowsCommand | Decode | ReportState


# The leader's connections to the other ranks, and a thread that notices when a rank has ended.


_REPLY_S = 60.0
_FAILURE_GRACE_S = 1.0
"""Seconds that the news of a rank's end may arrive after a step has failed because of it."""


class RankConnections:
    """Connections to all other ranks, which get equal messages.

    The watching thread has no references to tensors or ``Ranks``, so it may outlive them.
    """

    def __init__(self, links: Sequence[Connection], started: Sequence[Popen[bytes]]) -> None:
        """Watch the ranks. ``links[i]`` leads to rank ``i + 1``; ``started`` are our children."""
        self._links = list(links)
        self.child_processes = started
        self._process = os.getpid()
        self._closed = False
        self._failure: RanksFailed | None = None
        self._ended = threading.Event()
        """Event that is set once the reason of a failure is known."""
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self.on_failure: list[Callable[[], None]] = []
        """Callbacks for a failure, each in a thread of its own, since some wait for long."""
        threading.Thread(target=self._watch, name="roseinfer ranks", daemon=True).start()

    def send(self, message: object) -> None:
        self.require_alive()
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            for link in self._links:
                link.send_bytes(data)
        except OSError as error:
            raise self.mark_failed(error) from error

    def replies(self) -> list[Any]:
        """Wait for a reply of every rank, and return all in any order."""
        try:
            return [self._replies.get(timeout=_REPLY_S) for _ in self._links]
        except Empty:
            self.require_alive()
            raise RanksFailed(f"a rank did not reply within {_REPLY_S:.0f} s") from None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def require_alive(self) -> None:
        """Raise if the ranks have failed."""
        if self._failure is not None:
            raise RanksFailed(str(self._failure)) from self._failure.__cause__

    def mark_failed(self, error: BaseException) -> RanksFailed:
        """Mark the ranks as failed after a step that raised, and return the reason.

        They cannot continue: the others may be at any point of the step, and all-reduce would add
        values of two different steps.
        """
        if not self._ended.wait(_FAILURE_GRACE_S):  # otherwise the end of a rank is the reason
            self._fail(RanksFailed("a step failed", error))
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """Tell the other ranks to end, without waiting, so that a finalizer may call this."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        for link in self._links:
            with suppress(OSError):  # the rank has ended already
                link.send_bytes(pickle.dumps(None))

    def _fail(self, failure: RanksFailed) -> None:
        self._failure = self._failure or failure
        self._ended.set()
        for call in self.on_failure:
            threading.Thread(target=call, name="roseinfer ranks end", daemon=True).start()

    def _watch(self) -> None:
        at = 0
        try:
            while True:
                for link in connection.wait(self._links):
                    at = self._links.index(link)  # type: ignore[arg-type]
                    self._take(at)
        except (OSError, EOFError):
            if not self._closed:
                for process in self.child_processes:  # they may wait for the rank that has ended
                    process.kill()
                self._fail(RanksFailed(f"rank {at + 1} has ended"))
        for process in self.child_processes:
            process.wait()

    def _take(self, at: int) -> None:
        reply = pickle.loads(self._links[at].recv_bytes())
        if isinstance(reply, BaseException):
            self._fail(RanksFailed(f"rank {at + 1} failed: {reply}"))
        else:
            self._replies.put(reply)


_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time that a collective may wait for other ranks, whose GPUs may be compiling kernels."""
_FINISH_S, _POLL_S = 10.0, 0.001
"""Seconds that shutdown waits for work in progress, and seconds between two checks of it."""
_CONNECT_POLL_S = 0.2
"""Seconds between two checks for ended ranks while the group is being connected."""
_CONNECT_GRACE_S = 1.0
"""Seconds that connecting may still take after a rank has ended: it may have just connected."""
_NO_MONITOR = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Variables that turn torch's NCCL monitor off. It reads the store every second, which is removed
once all ranks have connected. And when a rank has ended it sleeps for 8 minutes, during which this
process cannot exit."""


class Ranks:
    """The ranks of one model, as one of them sees them, with their collectives on tensors."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device) -> None:
        """Wait until all ranks have connected through the store, which is not used afterwards."""
        self.rank, self.size = rank, size
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for this thread: another one may connect the group
        self.on_abort: list[Callable[[], None]] = []
        """Callbacks for the failure of a rank, before the group is aborted."""
        self.before_shutdown: list[Callable[[], None]] = []
        """Callbacks for the garbage collection of this object, which they must not reference."""
        self.after_shutdown: list[Callable[[], None]] = []
        """Callbacks after the group was shut down, which must not reference this object either."""
        self._connect_group(store)
        ended = _thread.allocate_lock()
        ended.acquire()
        args = self.before_shutdown, [self._group], device, self.after_shutdown, ended
        self.shut_down = weakref.finalize(self, _shut_down, *args, process=os.getpid())
        """Finalizer that shuts the group down, once. It holds no reference to this object."""
        self.shut_down.atexit = False
        atexit.register(_shut_down_at_exit, self.shut_down, ended, process=os.getpid())

    def _connect_group(self, store: Any) -> None:
        """Create the process group, and wait until all ranks have connected to it."""
        self._group = _group(store, self.rank, self.size, self.device)
        self.all_reduce_min(0)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up the tensors of all ranks, in place, and return the sum."""
        self._run_collective(
            self._group.allreduce, [x], self._in_order(distributed.AllreduceOptions())
        )
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the columns of each rank's ``[rows, columns]``, in order of ranks."""
        out = x.new_empty((self.size * len(x), x.shape[1]))
        options = self._in_order(AllgatherOptions())
        self._run_collective(self._group._allgather_base, out, x.contiguous(), options)
        return out.view(self.size, *x.shape).transpose(0, 1).reshape(len(x), -1)

    def broadcast(self, x: Tensor) -> None:
        """Replace the contents of a tensor by the leader's."""
        options = self._in_order(BroadcastOptions())  # the default root is rank 0, the leader
        self._run_collective(self._group.broadcast, [x], options)

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        smallest = torch.tensor([number], device=self.device)
        options = self._in_order(distributed.AllreduceOptions())
        options.reduceOp = distributed.ReduceOp(distributed.ReduceOp.MIN)
        self._run_collective(self._group.allreduce, [smallest], options)
        return int(smallest)

    def _in_order(self, options: Any) -> Any:
        """Make a collective run in the current stream of a GPU, so that a graph is a chain."""
        if self.device.type == "cuda":
            options.asyncOp = False
        return options

    def _run_collective(self, collective: Callable[..., Any], *args: Any) -> None:
        try:
            work = collective(*args)
            if work is not None:  # None if it runs in the current stream
                work.wait()
        except RuntimeError as error:
            raise RanksFailed("a collective failed: another rank has left it", error) from error


class LeadingRank(Ranks):
    """The first rank, which sends commands to the others."""

    def __init__(self, links: RankConnections, size: int, store: Any, device: torch.device) -> None:
        self.rank_connections = links
        super().__init__(0, size, store, device)
        # After the shutdown: NCCL takes a rank that ends earlier for an error.
        self.after_shutdown.append(links.close)
        weak_self = weakref.ref(self)

        def abort() -> None:
            if (ranks := weak_self()) is not None:
                calls, group = ranks.on_abort, ranks._group
                del ranks  # this may be the last reference, whose end finalizes the ranks
                _abort(calls, group)

        links.on_failure.append(abort)
        if links.failed:  # before the callback was added
            abort()

    def _connect_group(self, store: Any) -> None:
        """Connect the group, but stop waiting if a rank has ended; the waiting thread is left."""
        connected: Future[None] = Future()
        connect = super()._connect_group

        def run() -> None:
            try:
                connected.set_result(connect(store))
            except BaseException as error:  # for the waiting thread
                connected.set_exception(error)

        threading.Thread(target=run, name="roseinfer ranks meet", daemon=True).start()
        while not connected.done():
            wait([connected], _CONNECT_POLL_S)
            if self.rank_connections.failed and not wait([connected], _CONNECT_GRACE_S).done:
                self.rank_connections.require_alive()
        connected.result()

    def send_command(self, command: RankCommand) -> None:
        """Send a command to all other ranks. This rank must execute the same next."""
        self.rank_connections.send(command)

    def query_ranks(self, command: RankCommand) -> list[Any]:
        """Send a query to all other ranks, and return their replies in any order."""
        self.rank_connections.send(command)
        return self.rank_connections.replies()

    def require_alive(self) -> None:
        """Raise if the ranks have failed."""
        self.rank_connections.require_alive()

    def mark_failed(self, error: BaseException) -> RanksFailed:
        """Mark the ranks as failed after a step that raised, and return the reason."""
        return self.rank_connections.mark_failed(error)


class FollowingRank(Ranks):
    """Any rank but the first, which executes the leader's commands."""

    def __init__(
        self, rank: int, leader: Connection, size: int, store: Any, device: torch.device
    ) -> None:
        self._leader = leader
        super().__init__(rank, size, store, device)

    def receive_command(self) -> RankCommand | None:
        """Wait for the leader's next command, and return it; None if it sends no more."""
        try:
            command: RankCommand | None = pickle.loads(self._leader.recv_bytes())
        except (EOFError, OSError):
            return None
        if command is None and self.device.type == "cuda":
            self._finish()
        return command

    def _finish(self) -> None:
        """Wait until launched kernels have ended, since kernels of the leader wait for them.

        This waits for at most some seconds: after a step that failed at the leader, they never end.
        """
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        ends = time.monotonic() + _FINISH_S
        while not done.query() and time.monotonic() < ends:
            time.sleep(_POLL_S)

    def send_reply(self, reply: Any) -> None:
        self._leader.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def as_leader(ranks: Ranks | None) -> LeadingRank | None:
    """Return the ranks if this process leads them, else None."""
    return ranks if isinstance(ranks, LeadingRank) else None


def _abort(calls: Iterable[Callable[[], None]], group: Any) -> None:
    """Abort collectives that wait for a rank that has ended.

    NCCL ends its kernels at once, but from 2.26 on it returns only once no graph contains any of
    them. The graphs of an engine live as long as the engine, so no thread may wait for this.
    """
    for call in calls:
        call()
    group.abort()


def _shut_down(
    calls: Iterable[Callable[[], None]],
    resources: list[Any],
    device: torch.device,
    after_shutdown: Iterable[Callable[[], None]],
    ended: _thread.LockType,
    *,
    process: int,
) -> None:
    """End the group of collected ranks, in a thread that holds it until then.

    The group's own destructor would block the garbage collection. A thread of ``threading`` must
    not be started inside the code that a garbage collection interrupts.
    """
    if os.getpid() != process:  # a fork does not own the group
        return
    for call in calls:
        call()
    _thread.start_new_thread(_abort_group, (resources, device, after_shutdown, ended))


def _shut_down_at_exit(
    shut_down: Callable[[], object], ended: _thread.LockType, *, process: int
) -> None:
    """Shut the group of ranks down at exit, and wait for it, even if it is still referenced.

    At its own end NCCL may wait for things that no longer exist. And C++ that returns to a finished
    interpreter crashes the process.
    """
    if os.getpid() == process:
        shut_down()
        ended.acquire(timeout=_FINISH_S)


def _abort_group(
    resources: list[Any],
    device: torch.device,
    after_shutdown: Iterable[Callable[[], None]],
    ended: _thread.LockType,
) -> None:
    """End a group after its kernels have ended, since other ranks may wait for these."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        resources[0].abort()
    finally:
        for call in after_shutdown:
            call()
        resources.clear()  # the last reference to the group, whose destructor is C++ too
        ended.release()


def _group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Return the process group of the ranks of one host: NCCL for GPUs, otherwise Gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        set_default_environment(_NO_MONITOR)
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _COLLECTIVE_TIMEOUT
        return nccl(store, rank, size, options)
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # all ranks are on one host
    options._timeout = _COLLECTIVE_TIMEOUT
    return gloo(store, rank, size, options)
