"""What CUDA graphs move: their launches are noted when they are captured, and count in replays.

The host does nothing in a replay but start it. Amounts that depend on what tensors hold, such as
the lengths of sequences, are worked out anew when a replay begins.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch

from pytest_roseinfer.gates.work.moved.byte_recorder import ByteRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE_TYPE = "cuda"
UNKNOWN = "a CUDA graph captured before the test had roseinfer_costs"
_captured: WeakKeyDictionary[torch.cuda.CUDAGraph, ByteRecorder] = WeakKeyDictionary()


@contextmanager
def noting_captures() -> Iterator[None]:
    """Note what is captured meanwhile, whoever captures it."""
    kind = torch.cuda.CUDAGraph
    begin, end = kind.capture_begin, kind.capture_end
    under_way: dict[Any, ByteRecorder] = {}

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        under_way[graph] = ByteRecorder(DEVICE_TYPE, captures=True).__enter__()

    def capture_end(graph: Any) -> None:
        if graph in under_way:  # it began meanwhile too
            _captured[graph] = under_way.pop(graph)
            _captured[graph].__exit__(None, None, None)
        end(graph)

    with (
        mock.patch.object(kind, "capture_begin", capture_begin),
        mock.patch.object(kind, "capture_end", capture_end),
    ):
        yield


@contextmanager
def counting_replays(recorder: ByteRecorder) -> Iterator[None]:
    """Have ``recorder`` note what every replay moves."""
    kind = torch.cuda.CUDAGraph
    run = kind.replay

    def replay(graph: Any) -> None:
        if graph in _captured:
            for move in _captured[graph].moves:
                recorder.note(move)
            recorder.not_counted.update(_captured[graph].not_counted)
        else:
            recorder.not_counted[UNKNOWN] += 1
        run(graph)

    with mock.patch.object(kind, "replay", replay):
        yield
