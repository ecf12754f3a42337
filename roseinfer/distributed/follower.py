"""Following ranks: each loads its share of the model and executes the leader's commands."""

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

from roseinfer.attention.backend import ResidentBatch
from roseinfer.config import TorchrunRank
from roseinfer.decode.graphs import StepGraphs
from roseinfer.decode.slots import SlotRows
from roseinfer.decode.step import step_sizes
from roseinfer.distributed.ranks import (
    CopyBlocks,
    Decode,
    FollowingRank,
    Forward,
    PutBlocks,
    PutRows,
    PutTokens,
    RankCommand,
    ReportState,
)
from roseinfer.distributed.rendezvous import (
    connect_to_leader,
    follow_launched,
    lead_launched,
    start_and_lead,
)
from roseinfer.engine.runner import SequenceRunner
from roseinfer.errors import ConfigError, RanksFailed, error_with_type
from roseinfer.kv.manager import StepBatch
from roseinfer.kv.plan import AppendPlan
from roseinfer.models.loading import load, rank_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.config import EngineConfig
    from roseinfer.decode.graphs import StepKind
    from roseinfer.distributed.ranks import LeadingRank
    from roseinfer.models.loading import LoadedModel

_POLL_S = 0.5


class Follower:
    """The engine of a following rank, which computes its share of every step of the leader."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, ranks: FollowingRank) -> None:
        self._kv, self._model = loaded.kv, loaded.model
        self._ranks = ranks
        self._sequence_runner = SequenceRunner(
            loaded.model, loaded.kv, attention=config.attention_backend
        )
        self._rows: SlotRows | None = None
        self._graphs: StepGraphs | None = None
        self._tables: Sequence[Sequence[list[int]]] = []
        """Block lists of the last forward pass."""
        device = loaded.kv.device.type
        if config.uses_resident_decode(device):
            max_batch_size, staging = config.max_batch_size, self._sequence_runner.staging
            self._rows = SlotRows.of(max_batch_size, loaded.model, loaded.kv, staging)
            if device == "cuda" and config.cuda_graph is not False:
                graphs = StepGraphs(self._decode, self._rows, Counter())
                required = config.cuda_graph is True
                if graphs.capture(step_sizes(max_batch_size), required=required):
                    self._graphs = graphs

    def run(self) -> None:
        """Execute the leader's commands until it sends no more."""
        while (command := self._ranks.receive_command()) is not None:
            self._execute(command)

    @torch.inference_mode()
    def _execute(self, command: RankCommand) -> None:
        match command:
            case Forward():
                self._forward(command)
            case Decode(count, kind):
                run = self._graphs.run if self._graphs else self._decode
                run(count, kind)
            case CopyBlocks(layer, source, target):
                self._kv.apply_plan(AppendPlan(layer, [], [], copy_from=source, copy_to=target))
            case ReportState(part):
                self._ranks.send_reply(self._read_state(part))
            case _:
                self._put(command)

    def _put(self, command: PutRows | PutBlocks | PutTokens) -> None:
        rows = self._rows
        assert rows is not None
        match command:
            case PutRows(flat, count):
                rows.put_rows(flat, count)
            case PutBlocks(places, numbers):
                rows.put_blocks(places, numbers, 0)
            case PutTokens(slots):
                rows.put_tokens(slots, torch.empty_like(rows.tokens[: len(slots)]))

    def _forward(self, command: Forward) -> None:
        lists = self._tables = command.block_lists
        for block_lists, stored in zip(lists, command.lengths, strict=True):
            for group, block_ids in zip(self._kv.groups, block_lists, strict=True):
                self._kv.mirror_blocks(group.layers[0], block_ids, stored)
        for plan in command.plans.values():
            self._kv.apply_plan(plan)
        counts, lengths = command.counts, command.lengths
        self._sequence_runner.attention.prepare(
            StepBatch(self._kv, lists, counts, lengths, command.num_decodes, command.plans)
        )
        stage = self._sequence_runner.staging.stage
        token_ids, positions = stage([command.token_ids, command.positions]).columns
        rows = None if command.rows is None else stage([command.rows]).columns[0]
        self._model.logits(token_ids, positions, rows, self._sequence_runner.attention)

    def _decode(self, count: int, kind: StepKind) -> None:  # noqa: ARG002
        """Store the token of each of the first ``count`` slots; get the next one from the leader.

        Every rank has a graph for each kind of step, since all ranks capture them together.
        """
        rows = self._rows
        assert rows is not None
        lengths = rows.lengths(count)
        self._sequence_runner.attention.prepare(ResidentBatch(rows.tables(count), lengths))
        self._model.logits(rows.tokens[:count], lengths, None, self._sequence_runner.attention)
        rows.broadcast_tokens(count)
        lengths += rows.active(count)

    def _read_state(self, part: str) -> Any:
        if part == "caches":
            return self._kv.keys.cpu(), self._kv.values.cpu()
        if self._rows is None:
            return self._tables, []
        slots = len(self._rows.tokens)
        return self._tables, [table.tolist() for table in self._rows.tables(slots)]


def run_follower(folder: Path, rank: int, size: int) -> None:
    """Join the leader that waits in ``folder``, and execute its commands until it sends no more."""
    link, store, (model, config, device, dtype) = connect_to_leader(folder, rank, size)
    try:
        own_device = rank_device(device, rank, size)
        link.send(None)
        ranks = FollowingRank(rank, link, size, store, own_device)
        Follower(load(model, config, dtype=dtype, ranks=ranks), config, ranks).run()
    except BaseException as error:  # the leader must know of any failure
        with suppress(OSError):  # the leader has ended
            link.send(RanksFailed(error_with_type(error)))
        raise


def run_follower_process(folder: Path, rank: int, size: int, parent: int | None = None) -> NoReturn:
    """Run a follower, and exit after it, or when the parent process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # under torchrun Ctrl-C goes to all ranks
    threading.Thread(target=_exit_with_parent, args=(parent or os.getppid(),), daemon=True).start()
    status = 1
    try:
        run_follower(folder, rank, size)
        status = 0
    finally:
        os._exit(status)  # a normal exit would hang if the GPU waits for a rank that has ended


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process has ended, even while other threads wait."""
    while os.getppid() == parent:
        sleep(_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    run_follower_process(Path(sys.argv[1]), *map(int, sys.argv[2:5]))


# Rendezvous of the ranks, before any of them loads the model.


def lead_ranks(
    model: Any, config: EngineConfig, device: str | None, dtype: str | None
) -> LeadingRank:
    """Return the ranks that load the same model, with this process as their leader.

    Under ``torchrun`` the first process leads. In the others this runs a follower until the leader
    ends it, and exits.
    """
    size, launched = config.tensor_parallel_size, TorchrunRank.from_env()
    if launched is not None and launched.size != size:
        raise ConfigError(
            f"tensor_parallel_size={size}, and torchrun started {launched.size} processes: give "
            f"torchrun --nproc-per-node {size}, or start the command without it"
        )
    if launched is not None and launched.rank:
        run_follower_process(follow_launched(launched), launched.rank, size)
    own_device = rank_device(device, 0, size)
    if isinstance(model, nn.Module):
        model.to("cpu")  # the others unpickle it, and would do so on this rank's GPU
    lead = start_and_lead if launched is None else lead_launched
    return lead(size, own_device, (model, config, device, dtype))
