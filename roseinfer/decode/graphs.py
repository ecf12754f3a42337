"""Decode steps captured as CUDA graphs, for each size of a step."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.errors import ConfigError, RanksFailed
from roseinfer.paths import EnginePath
from roseinfer.sampling_params import MOST_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roseinfer.decode.slots import SlotRows

# What a resident step does beside decoding. Each kind is captured as graphs of its own.


class StepKind(NamedTuple):
    """What the sequences of a step ask for together. Those that ask for less get it all the same,
    and are no worse for it."""

    greedy: bool
    """Every token is the likeliest."""
    penalised: bool = False
    """Tokens are tallied, and penalties taken."""
    guided: bool = False
    """Tokens are chosen among those that are allowed."""
    tops: int | None = None
    """Log-probabilities are told, and those of so many likeliest tokens; None where none are."""
    long: bool = False
    """The only sequence is too long for a step in one kernel."""


def tops_told(*, told: bool, tops: bool) -> int | None:
    """Return of how many likeliest tokens a step tells, if some request asks for any."""
    return (MOST_TOP_LOGPROBS if tops else 0) if told else None


_LOG = logging.getLogger("roseinfer")
_Graphs = dict[tuple[int, StepKind], tuple[torch.cuda.CUDAGraph, Counter[str]]]


class StepGraphs:
    """Runs steps by replaying graphs of them, which read the rows as they are by then.

    A step is captured on empty rows, whose tokens go to the scratch block: no block that a
    sequence holds is touched.
    """

    def __init__(
        self, step: Callable[..., None], rows: SlotRows, path_counts: Counter[str]
    ) -> None:
        self._step = step
        self._rows = rows
        self._path_counts = path_counts
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: _Graphs = {}
        if rows.ranks is not None:  # NCCL does not end before what graphs have of it
            rows.ranks.before_end.append(partial(_reset, self._graphs))

    def capture(self, sizes: Sequence[int], *, required: bool) -> bool:
        """Capture plain steps of all sizes, the largest first: the others use the memory it leaves.

        A model whose modules wait for the host cannot be captured. Where graphs are not required,
        this returns False then.
        """
        before = Counter(self._path_counts)
        try:
            for count in sorted(sizes, reverse=True):
                for greedy in (True, False):
                    self._capture(count, StepKind(greedy))
        except (torch.OutOfMemoryError, RanksFailed):
            raise
        except RuntimeError as error:
            self._path_counts.clear()
            self._path_counts.update(before)
            why = str(error).splitlines()[0]
            if required:
                raise ConfigError(
                    f"cuda_graph=True: the model's step cannot be captured ({why}): leave it off"
                ) from error
            _reset(self._graphs)
            _LOG.warning("steps run without CUDA graphs, since they cannot be captured: %s", why)
            return False
        return True

    def run(self, count: int, kind: StepKind) -> None:
        """Replay the step; it is captured first if it never was."""
        if (count, kind) not in self._graphs:
            self._capture(count, kind)
        graph, counts = self._graphs[count, kind]
        graph.replay()
        self._path_counts.update(counts)

    def _capture(self, count: int, kind: StepKind) -> None:
        graph = torch.cuda.CUDAGraph()
        before = Counter(self._path_counts)
        with self._rows.emptied():
            self._step(count, kind)  # compiles kernels and asks for workspaces
            torch.cuda.synchronize()
            warm = Counter(self._path_counts)
            # Other threads may ask things of the GPU meanwhile without ending the capture.
            mode = "thread_local"
            with (
                _nothing_is_collected(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode),
            ):
                self._step(count, kind)
        counts = self._path_counts - warm
        counts[EnginePath.GRAPH] = 1
        self._path_counts.clear()
        self._path_counts.update(before)
        self._graphs[count, kind] = (graph, counts)


def _reset(graphs: _Graphs) -> None:
    for graph, _ in graphs.values():
        graph.reset()
    graphs.clear()


@contextmanager
def _nothing_is_collected() -> Iterator[None]:
    """Keep garbage from being collected: destroying another engine's graph ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
