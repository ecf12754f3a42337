"""One process's place among the ranks of a model: what it adds up, and whom it tells or hears.

Ranks compute the same steps, each with its share of the heads. The first leads: it plans, chooses
tokens, and tells the others what to do.
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
from datetime import timedelta
from multiprocessing import connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions

from roseinfer.config import prefer_variables
from roseinfer.errors import RanksFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection
    from subprocess import Popen

    from torch import Tensor

    from roseinfer.distributed.orders import Order

# The leader's links to the other ranks, and a thread that notices when one of them has ended.


_REPLY_S = 60.0
_LINK_GLANCE_S = 1.0
"""A step that breaks off since a rank has ended may be so much earlier than the news of that."""


class Links:
    """Sends to all other ranks alike, and takes what they answer.

    The thread knows nothing of tensors and of those who move them, so it may outlive them.
    """

    def __init__(self, links: Sequence[Connection], started: Sequence[Popen[bytes]]) -> None:
        """``links[i]`` leads to rank ``i + 1``, and ``started`` are those that are our children."""
        self._links = list(links)
        self.started = started
        self._process = os.getpid()
        self._closed = False
        self._failure: RanksFailed | None = None
        self._ended = threading.Event()
        """Set when it is known why the ranks cannot go on."""
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self.on_failure: list[Callable[[], None]] = []
        """Called when the ranks cannot go on, each in a thread of its own: some wait for long."""
        threading.Thread(target=self._watch, name="roseinfer ranks", daemon=True).start()

    def send(self, what: object) -> None:
        self.require()
        message = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        try:
            for link in self._links:
                link.send_bytes(message)
        except OSError as error:
            raise self.break_off(error) from error

    def replies(self) -> list[Any]:
        """Wait for an answer of every rank, and return them in any order."""
        try:
            return [self._replies.get(timeout=_REPLY_S) for _ in self._links]
        except Empty:
            self.require()
            raise RanksFailed(f"a rank gave no answer for {_REPLY_S:.0f} s") from None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def require(self) -> None:
        """Raise if the ranks cannot go on."""
        if self._failure is not None:
            raise RanksFailed(str(self._failure)) from self._failure.__cause__

    def break_off(self, error: BaseException) -> RanksFailed:
        """Return why the ranks cannot go on after a step that broke off.

        Nobody knows how far the others came, and what belongs to two steps would be added up.
        """
        if not self._ended.wait(_LINK_GLANCE_S):  # else that a rank has ended is why
            self._fail(RanksFailed("a step broke off", error))
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """Let the other ranks end. This waits for nothing, so that a finaliser may call it."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        for link in self._links:
            with suppress(OSError):  # it has ended already
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
                for process in self.started:  # they may wait for the one that is gone
                    process.kill()
                self._fail(RanksFailed(f"rank {at + 1} has ended"))
        for process in self.started:
            process.wait()

    def _take(self, at: int) -> None:
        answer = pickle.loads(self._links[at].recv_bytes())
        if isinstance(answer, BaseException):
            self._fail(RanksFailed(f"rank {at + 1} broke down: {answer}"))
        else:
            self._replies.put(answer)


_LONGEST = timedelta(minutes=30)
"""Ranks may wait so long for one another: a GPU compiles its kernels meanwhile."""
_FINISH_S, _GLANCE_S = 10.0, 0.001
"""What is let go finishes what it has begun for so long, and a rank looks so often."""
_MEET_S = 0.2
"""Ranks that come together are asked so often whether one of them has ended."""
_LAST_S = 1.0
"""One that ended just behind their meeting lets the others come away from it within so long."""
_NO_MONITOR = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Torch's monitor of NCCL looks into the store every second, which is gone once all have met. And
when a rank has ended it sleeps for 8 minutes, in which this process cannot exit."""


class Ranks:
    """The ranks of one model, as any of them sees them: what they do to tensors together."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device) -> None:
        """Wait until all ranks have come to the store, which none needs from then on."""
        self.rank, self.size = rank, size
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: ranks may meet in another
        self.on_abort: list[Callable[[], None]] = []
        """Called when a rank has ended, before all else."""
        self.before_end: list[Callable[[], None]] = []
        """Called when nobody has these ranks any more. What is called may not hold them itself."""
        self.behind_end: list[Callable[[], None]] = []
        """Called when their group has ended, likewise."""
        self._meet(store)
        ended = _thread.allocate_lock()
        ended.acquire()
        given = self.before_end, [self._group], device, self.behind_end, ended
        self.let_go = weakref.finalize(self, _let_go, *given, process=os.getpid())
        """Ends the group, once. Who has it does not have the ranks."""
        self.let_go.atexit = False
        atexit.register(_exit_behind, self.let_go, ended, process=os.getpid())

    def _meet(self, store: Any) -> None:
        """Make the group that moves tensors, and wait until all ranks have come to it."""
        self._group = _group(store, self.rank, self.size, self.device)
        self.least(0)

    def add_up(self, x: Tensor) -> Tensor:
        """Add up what each rank has, in place, and return it."""
        self._together(self._group.allreduce, [x], self._in_order(distributed.AllreduceOptions()))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Put the columns of ``[rows, columns]`` of each rank side by side."""
        out = x.new_empty((self.size * len(x), x.shape[1]))
        options = self._in_order(AllgatherOptions())
        self._together(self._group._allgather_base, out, x.contiguous(), options)
        return out.view(self.size, *x.shape).transpose(0, 1).reshape(len(x), -1)

    def share(self, x: Tensor) -> None:
        """Have what the leader has in a tensor."""
        options = self._in_order(BroadcastOptions())  # the leader's, if not told
        self._together(self._group.broadcast, [x], options)

    def least(self, number: int) -> int:
        """Return the least number that any rank has."""
        found = torch.tensor([number], device=self.device)
        options = self._in_order(distributed.AllreduceOptions())
        options.reduceOp = distributed.ReduceOp(distributed.ReduceOp.MIN)
        self._together(self._group.allreduce, [found], options)
        return int(found)

    def _in_order(self, options: Any) -> Any:
        """Have a GPU do it among its other work and not beside that: a graph is then a chain."""
        if self.device.type == "cuda":
            options.asyncOp = False
        return options

    def _together(self, what: Callable[..., Any], *given: Any) -> None:
        try:
            work = what(*given)
            if work is not None:  # there is none where it is in order already
                work.wait()
        except RuntimeError as error:
            raise RanksFailed("another rank does not take part any more", error) from error


class LeadingRank(Ranks):
    """The first rank, which tells the others what to do."""

    def __init__(self, links: Links, size: int, store: Any, device: torch.device) -> None:
        self.links = links
        super().__init__(0, size, store, device)
        self.behind_end.append(links.close)  # NCCL would take a rank that ends before for an error
        own = weakref.ref(self)

        def abort() -> None:
            if (ranks := own()) is not None:
                calls, group = ranks.on_abort, ranks._group
                del ranks  # whose end it may take
                _abort(calls, group)

        links.on_failure.append(abort)
        if links.failed:  # before that
            abort()

    def _meet(self, store: Any) -> None:
        """Wait for no rank that has ended: what waits for it then is left to itself."""
        met: Future[None] = Future()
        meet = super()._meet

        def run() -> None:
            try:
                met.set_result(meet(store))
            except BaseException as error:  # for whoever waits
                met.set_exception(error)

        threading.Thread(target=run, name="roseinfer ranks meet", daemon=True).start()
        while not met.done():
            wait([met], _MEET_S)
            if self.links.failed and not wait([met], _LAST_S).done:
                self.links.require()
        met.result()

    def tell(self, order: Order) -> None:
        """Have all other ranks do something. What this rank does next must be the same."""
        self.links.send(order)

    def ask(self, order: Order) -> list[Any]:
        """Have all other ranks tell something, and return their answers in any order."""
        self.links.send(order)
        return self.links.replies()

    def require(self) -> None:
        """Raise if the ranks cannot go on."""
        self.links.require()

    def break_off(self, error: BaseException) -> RanksFailed:
        """Return why the ranks cannot go on after a step that broke off."""
        return self.links.break_off(error)


class FollowingRank(Ranks):
    """Any other rank, which does as it is told."""

    def __init__(
        self, rank: int, leader: Connection, size: int, store: Any, device: torch.device
    ) -> None:
        self._leader = leader
        super().__init__(rank, size, store, device)

    def hear(self) -> Order | None:
        """Wait for the leader's next order, and return it; None when it wants no more."""
        try:
            order: Order | None = pickle.loads(self._leader.recv_bytes())
        except (EOFError, OSError):
            return None
        if order is None and self.device.type == "cuda":
            self._finish()
        return order

    def _finish(self) -> None:
        """Do what was begun: the leader's kernels wait for it.

        This waits for some seconds alone. After a step that broke off there, it has no end.
        """
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        ends = time.monotonic() + _FINISH_S
        while not done.query() and time.monotonic() < ends:
            time.sleep(_GLANCE_S)

    def answer(self, what: Any) -> None:
        self._leader.send_bytes(pickle.dumps(what, pickle.HIGHEST_PROTOCOL))


def leader_of(ranks: Ranks | None) -> LeadingRank | None:
    """Return the ranks if they are seen by the one that leads them."""
    return ranks if isinstance(ranks, LeadingRank) else None


def _abort(calls: Iterable[Callable[[], None]], group: Any) -> None:
    """End what waits for a rank that is gone.

    NCCL ends its kernels at once, but from 2.26 on it returns only when no graph has any of them.
    Those of an engine live as long as the engine, so nobody may wait for this.
    """
    for call in calls:
        call()
    group.abort()


def _let_go(
    calls: Iterable[Callable[[], None]],
    held: list[Any],
    device: torch.device,
    behind: Iterable[Callable[[], None]],
    ended: _thread.LockType,
    *,
    process: int,
) -> None:
    """End the group of ranks that nobody has any more, in a thread that has it until then.

    Its own end would hold up whoever collects garbage. A thread of ``threading`` must not be
    started in the middle of what that interrupts.
    """
    if os.getpid() != process:  # a fork has none of it
        return
    for call in calls:
        call()
    _thread.start_new_thread(_end, (held, device, behind, ended))


def _exit_behind(let_go: Callable[[], object], ended: _thread.LockType, *, process: int) -> None:
    """Exit when the group of ranks has ended, which somebody may still have.

    What NCCL's own end waits for may be gone by then. And C++ that returns to an interpreter that
    is gone takes the process down with it.
    """
    if os.getpid() == process:
        let_go()
        ended.acquire(timeout=_FINISH_S)


def _end(
    held: list[Any],
    device: torch.device,
    behind: Iterable[Callable[[], None]],
    ended: _thread.LockType,
) -> None:
    """End a group when its kernels have ended, which others may wait for."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        held[0].abort()
    finally:
        for call in behind:
            call()
        held.clear()  # the last of the group, whose own end is C++ too
        ended.release()


def _group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Return the group that moves tensors between the ranks of one host."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        prefer_variables(_NO_MONITOR)
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _LONGEST
        return nccl(store, rank, size, options)
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # the ranks are of one host
    options._timeout = _LONGEST
    return gloo(store, rank, size, options)
