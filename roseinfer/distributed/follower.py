"""What a rank that does not lead does: it loads its share of the model, and does as it is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from roseinfer.attention.backend import ResidentBatch, StepBatch
from roseinfer.config import Launched
from roseinfer.decode.graphs import StepGraphs
from roseinfer.decode.slots import SlotRows
from roseinfer.decode.step import ladder
from roseinfer.distributed.meeting import follow_launched, join, lead_launched, start_others
from roseinfer.distributed.orders import (
    Copies,
    Decode,
    Forward,
    Order,
    PutBlocks,
    PutRows,
    PutTokens,
    Tell,
)
from roseinfer.distributed.ranks import FollowingRank
from roseinfer.engine.runner import SequenceRunner
from roseinfer.errors import ConfigError, RanksFailed, with_kind
from roseinfer.kv.manager import StepAppend
from roseinfer.kv.plan import AppendPlan
from roseinfer.models.loading import load, rank_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.config import EngineConfig
    from roseinfer.decode.graphs import StepKind
    from roseinfer.distributed.ranks import LeadingRank
    from roseinfer.models.loading import Loaded

_GLANCE_S = 0.5


class Follower:
    """Computes its share of every step, on tables that the leader sends."""

    def __init__(self, loaded: Loaded, config: EngineConfig, ranks: FollowingRank) -> None:
        self._kv, self._model = loaded.kv, loaded.model
        self._ranks = ranks
        self._sessions = SequenceRunner(loaded.model, loaded.kv, attention=config.attention_backend)
        self._rows: SlotRows | None = None
        self._graphs: StepGraphs | None = None
        self._tables: Sequence[Sequence[list[int]]] = []
        """The block lists of the last forward pass."""
        device = loaded.kv.device.type
        if config.decodes_in_slots(device):
            most, staging = config.max_batch_size, self._sessions.staging
            self._rows = SlotRows.of(most, loaded.model, loaded.kv, staging)
            if device == "cuda" and config.cuda_graph is not False:
                graphs = StepGraphs(self._decode, self._rows, Counter())
                required = config.cuda_graph is True
                if graphs.capture(ladder(most), required=required):
                    self._graphs = graphs

    def run(self) -> None:
        """Do what the leader says until it wants no more."""
        while (order := self._ranks.hear()) is not None:
            self._do(order)

    @torch.inference_mode()
    def _do(self, order: Order) -> None:
        match order:
            case Forward():
                self._forward(order)
            case Decode(count, kind):
                run = self._graphs.run if self._graphs else self._decode
                run(count, kind)
            case Copies(layer, source, target):
                self._kv.carry_out(AppendPlan(layer, [], [], copy_from=source, copy_to=target))
            case Tell(what):
                self._ranks.answer(self._known(what))
            case _:
                self._put(order)

    def _put(self, order: PutRows | PutBlocks | PutTokens) -> None:
        rows = self._rows
        assert rows is not None
        match order:
            case PutRows(flat, count):
                rows.put(flat, count)
            case PutBlocks(places, numbers):
                rows.put_numbers(places, numbers, 0)
            case PutTokens(slots):
                rows.put_tokens(slots, torch.empty_like(rows.tokens[: len(slots)]))

    def _forward(self, order: Forward) -> None:
        lists = self._tables = order.block_lists
        for own, stored in zip(lists, order.lengths, strict=True):
            for group, block_ids in zip(self._kv.groups, own, strict=True):
                self._kv.adopt(group.layers[0], block_ids, stored)
        for plan in order.plans.values():
            self._kv.carry_out(plan)
        new = StepAppend(self._kv, lists, order.counts, one_each=False, plans=order.plans)
        self._sessions.attention.prepare(
            StepBatch(new, lists, order.counts, order.lengths, order.singles)
        )
        stage = self._sessions.staging.stage
        token_ids, positions = stage([order.token_ids, order.positions]).columns
        rows = None if order.rows is None else stage([order.rows]).columns[0]
        self._model.logits(token_ids, positions, rows, self._sessions.attention)

    def _decode(self, count: int, kind: StepKind) -> None:  # noqa: ARG002
        """Store the token of each of the first slots, and take the next one from the leader.

        There is a graph for each kind of step on every rank, since they are captured together.
        """
        rows = self._rows
        assert rows is not None
        lengths = rows.lengths(count)
        self._sessions.attention.prepare(ResidentBatch(rows.tables(count), lengths))
        self._model.logits(rows.tokens[:count], lengths, None, self._sessions.attention)
        rows.share_tokens(count)
        lengths += rows.active(count)

    def _known(self, what: str) -> Any:
        if what == "caches":
            return self._kv.keys.cpu(), self._kv.values.cpu()
        if self._rows is None:
            return self._tables, []
        slots = len(self._rows.tokens)
        return self._tables, [table.tolist() for table in self._rows.tables(slots)]


def follow_in(folder: Path, rank: int, size: int) -> None:
    """Join the leader who waits in ``folder``, and do as it says until it wants no more."""
    link, store, (model, config, device, dtype) = join(folder, rank, size)
    try:
        where = rank_device(device, rank, size)
        link.send(None)
        ranks = FollowingRank(rank, link, size, store, where)
        Follower(load(model, config, dtype=dtype, ranks=ranks), config, ranks).run()
    except BaseException as error:  # whatever it is, the leader must know
        with suppress(OSError):  # it has ended itself
            link.send(RanksFailed(with_kind(error)))
        raise


def follow(folder: Path, rank: int, size: int, parent: int | None = None) -> NoReturn:
    """Do so in a process that ends with it, or when the process that started it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # under torchrun Ctrl-C goes to all of them
    threading.Thread(target=_end_with, args=(parent or os.getppid(),), daemon=True).start()
    status = 1
    try:
        follow_in(folder, rank, size)
        status = 0
    finally:
        os._exit(status)  # a GPU that waits for a rank that is gone would hold up any other end


def _end_with(parent: int) -> None:
    """End this process when its parent has, whatever it waits for."""
    while os.getppid() == parent:
        sleep(_GLANCE_S)
    os._exit(1)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), *map(int, sys.argv[2:5]))


# Brings the ranks of a model together, before any of them loads it.


def lead(model: Any, config: EngineConfig, device: str | None, dtype: str | None) -> LeadingRank:
    """Return the ranks that load the same model; this process leads them.

    Under ``torchrun`` the first process does. In the others this follows until the first lets them
    go, and ends them.
    """
    size, launched = config.tensor_parallel_size, Launched.from_env()
    if launched is not None and launched.size != size:
        raise ConfigError(
            f"tensor_parallel_size={size}, and torchrun started {launched.size} processes: give "
            f"torchrun --nproc-per-node {size}, or start the command without it"
        )
    if launched is not None and launched.rank:
        follow(follow_launched(launched), launched.rank, size)
    where = rank_device(device, 0, size)
    if isinstance(model, nn.Module):
        model.to("cpu")  # the others read it from the message, and would fill this rank's GPU
    bring_together = start_others if launched is None else lead_launched
    return bring_together(size, where, (model, config, device, dtype))
