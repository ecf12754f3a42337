"""CUDA graphs of decode steps, one per step size and kind."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.errors import ConfigError, RanksFailed
from roseinfer.garbage import gc_disabled
from roseinfer.kernels.kernel import compile_in_parallel
from roseinfer.paths import EnginePath
from roseinfer.sampling_params import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.decode.slots import SlotRows

# Kinds of decode steps; each kind has its own graphs.


class StepKind(NamedTuple):
    """Features of a decode step: the union of those that its sequences need.

    Sequences that need fewer of them get the same tokens all the same.
    """

    greedy: bool
    """True if every sequence takes the argmax."""
    has_penalties: bool = False
    """True if the step counts tokens and applies penalties."""
    guided: bool = False
    """True if the step applies the token bitmasks of guides."""
    num_top_logprobs: int | None = None
    """Number of top logprobs per token; 0 for the chosen token's alone, None for no logprobs."""
    long_context: bool = False
    """True if the only sequence is too long for a step in one kernel."""


def required_top_logprobs(*, logprobs: bool, num_top_logprobs: bool) -> int | None:
    """Return ``StepKind.num_top_logprobs`` of a step.

    ``logprobs``: some request wants logprobs; ``num_top_logprobs``: some request wants top
    logprobs.
    """
    return (MAX_TOP_LOGPROBS if num_top_logprobs else 0) if logprobs else None


_LOG = logging.getLogger("roseinfer")
_Graphs = dict[tuple[int, StepKind], tuple[torch.cuda.CUDAGraph, Counter[str]]]


class StepGraphs:
    """Runner of steps as CUDA graphs, which read the rows as they are at each replay.

    A step is captured on padding rows, whose tokens go to the scratch block, so that capturing
    changes no block that a sequence holds.
    """

    def __init__(
        self, step: Callable[..., None], rows: SlotRows, path_counts: Counter[str]
    ) -> None:
        self._step = step
        self._rows = rows
        self._path_counts = path_counts
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: _Graphs = {}
        if rows.ranks is not None:  # NCCL cannot shut down before graphs release it
            rows.ranks.before_shutdown.append(partial(_reset, self._graphs))

    def capture(self, sizes: Sequence[int], *, required: bool) -> bool:
        """Capture plain steps of all sizes, the largest first: the others reuse its memory.

        A model whose modules synchronize with the host cannot be captured: this raises
        ``ConfigError`` if ``required``, and otherwise logs a warning and returns False.
        """
        before = Counter(self._path_counts)
        try:
            if self._rows.ranks is None:
                self._compile(sizes)
            for count in sorted(sizes, reverse=True):
                for greedy in (True, False):
                    self._capture(count, StepKind(greedy))
        except (torch.OutOfMemoryError, RanksFailed):
            raise
        except RuntimeError as error:
            self._path_counts.clear()
            self._path_counts.update(before)
            reason = str(error).splitlines()[0]
            if required:
                raise ConfigError(
                    f"cuda_graph=True: the model's step cannot be captured ({reason}); turn it off"
                ) from error
            _reset(self._graphs)
            _LOG.warning("CUDA graphs: steps cannot be captured and run without graphs: %s", reason)
            return False
        return True

    def run(self, count: int, kind: StepKind) -> None:
        """Replay the step, after capturing it if it has not been yet."""
        if (count, kind) not in self._graphs:
            self._capture(count, kind)
        graph, counts = self._graphs[count, kind]
        graph.replay()
        self._path_counts.update(counts)

    def _compile(self, sizes: Sequence[int]) -> None:
        """Compile the kernels of steps of these sizes at the same time.

        Greedy steps have all of them: others sample in torch.
        """
        before = Counter(self._path_counts)
        greedy = StepKind(greedy=True)
        with self._rows.all_padding():
            device = self._rows.tokens.device
            compile_in_parallel(lambda: [self._step(size, greedy) for size in sizes], device)
        self._path_counts.clear()
        self._path_counts.update(before)

    def _capture(self, count: int, kind: StepKind) -> None:
        graph = torch.cuda.CUDAGraph()
        before = Counter(self._path_counts)
        with self._rows.all_padding():
            self._step(count, kind)  # compiles kernels and allocates workspaces
            torch.cuda.synchronize()
            warm = Counter(self._path_counts)
            # Calls that other threads make to CUDA meanwhile must not invalidate the capture.
            mode = "thread_local"
            with (
                gc_disabled(),  # destroying another engine's graph invalidates a capture
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode),
            ):
                self._step(count, kind)
        counts = self._path_counts - warm
        counts[EnginePath.CUDA_GRAPH] = 1
        self._path_counts.clear()
        self._path_counts.update(before)
        self._graphs[count, kind] = (graph, counts)


def _reset(graphs: _Graphs) -> None:
    for graph, _ in graphs.values():
        graph.reset()
    graphs.clear()
