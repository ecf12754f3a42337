"""Following ranks: each loads its share of the model and executes the leader's commands."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from time import sleep
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from roseinfer.config import TorchrunRank
from roseinfer.decode.step import RowSteps, step_sizes
from roseinfer.distributed.ranks import (
    CopyBlocks,
    Decode,
    FollowingRank,
    Forward,
    PutBlocks,
    PutFirstTokens,
    PutRows,
    PutTokens,
    RankCommand,
    ReportState,
    RowsCommand,
)
from roseinfer.distributed.rendezvous import (
    connect_to_leader,
    follow_launched,
    lead_launched,
    start_and_lead,
)
from roseinfer.engine.runner import SequenceRunner, span_rows
from roseinfer.errors import ConfigError, RanksFailed, error_with_type
from roseinfer.kv.manager import StepBatch
from roseinfer.kv.plan import AppendPlan
from roseinfer.models.loading import load, rank_device
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from roseinfer.config import EngineConfig
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
        self._steps: dict[EnginePath, RowSteps] = {}
        self._tables: Sequence[Sequence[list[int]]] = []
        """Block lists of the last forward pass."""
        device = loaded.kv.device.type
        if config.uses_resident_decode(device):
            parts = loaded.model, self._sequence_runner.attention
            residents = RowSteps.of_residents(*parts, config.max_batch_size)
            self._steps[EnginePath.RESIDENT] = residents
            graphs = device == "cuda" and config.cuda_graph is not False
            if graphs:
                sizes = step_sizes(config.max_batch_size)
                graphs = residents.capture(sizes, required=config.cuda_graph is True)
            for path, (most, captured) in span_rows(config, graphs=graphs).items():
                self._steps[path] = RowSteps.of_spans(*parts, most, path, captured_rows=captured)

    def run(self) -> None:
        """Execute the leader's commands until it sends no more."""
        while (command := self._ranks.receive_command()) is not None:
            self._execute(command)

    @torch.inference_mode()
    def _execute(self, command: RankCommand) -> None:
        match command:
            case Forward():
                self._forward(command)
            case Decode(path, count, kind):
                self._steps[path].run(count, kind)
            case CopyBlocks(layer, source, target):
                self._kv.apply_plan(AppendPlan(layer, [], [], copy_from=source, copy_to=target))
            case ReportState(part):
                self._ranks.send_reply(self._read_state(part))
            case _:
                self._put(command)

    def _put(self, command: RowsCommand) -> None:
        rows = self._steps[command.path].rows
        match command:
            case PutRows(_, flat, count):
                rows.put_rows(flat, count)
            case PutBlocks(_, places, numbers):
                rows.put_blocks(places, numbers, 0)
            case PutTokens(_, slots):
                rows.put_tokens(slots, torch.empty_like(rows.tokens[: len(slots)]))
            case PutFirstTokens(_, tokens):
                rows.put_first_tokens(tokens)

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

    def _read_state(self, part: str) -> Any:
        if part == "caches":
            return self._kv.keys.cpu(), self._kv.values.cpu()
        if EnginePath.RESIDENT not in self._steps:
            return self._tables, []
        rows = self._steps[EnginePath.RESIDENT].rows
        return self._tables, [table.tolist() for table in rows.tables(len(rows.tokens))]


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
