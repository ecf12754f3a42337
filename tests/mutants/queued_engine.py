"""This distribution's engine on a simulated device that runs late."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import DeviceQueue
from pytest_roseinfer.capabilities.simulated_device import QueuedTorch
from pytest_roseinfer.targets.roseinfer_engine import RoseinferEngine
from roseinfer import AttentionPath, EnginePath, SamplingParams
from tests.late_transfers import late_transfers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import FastPath, RequestMix

_RING = 16
"""Number of index buffers: enough for a step, and few enough for frequent reuse."""
_KERNELS = {
    AttentionPath.DECODE_TRITON.value,
    AttentionPath.APPEND_AND_ATTEND.value,
    AttentionPath.CHUNK_TRITON.value,
    EnginePath.FUSED.value,
    EnginePath.FUSED_ARGMAX.value,
}
_CALLS = "calls_a_step"


class QueuedEngine(RoseinferEngine):
    """Engine with torch operations only, because the simulation does not delay kernels."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        name: replace(path, device="cuda") if name in _KERNELS else path
        for name, path in RoseinferEngine.paths.items()
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RoseinferEngine.option_choices,
        "resident_decode": (True, False),
        "run_ahead": (3, 0, 1),
        "per_layer_kv": (False,),
        # Calls that the device runs between steps in which the host does not wait.
        _CALLS: (0, 10, 300),
    }

    def make(self, mix: RequestMix) -> None:
        options = dict(mix.options)
        self._calls = options.pop(_CALLS)
        self._queue = queue = DeviceQueue()
        with late_transfers(queue, _RING):
            super().make(replace(mix, options=options))
        sessions, resident = self.engine.sequence_runner, self.engine._runner._resident
        network = sessions.model._model
        queue.on_device(sessions.kv.keys, sessions.kv.values)
        queue.on_device(*network.parameters(), *network.buffers())
        if resident is not None:
            rows = resident.slots.rows
            queue.on_device(rows._rows, rows.tokens, resident.steps.tokens)
            resident.supports(SamplingParams(presence_penalty=1.0), sessions.model.shape.vocab_size)
            penalties: Any = resident.steps.penalties
            queue.on_device(penalties.rows, penalties.token_counts, penalties._no_penalties)

    def step(self) -> None:
        with QueuedTorch(self._queue):
            super().step()
        self._queue.run(self._calls)

    def cancel(self, request: Any) -> None:
        with QueuedTorch(self._queue):
            super().cancel(request)

    def pause(self, request: Any) -> None:
        with QueuedTorch(self._queue):
            super().pause(request)

    def resume(self, request: Any) -> None:
        with QueuedTorch(self._queue):
            super().resume(request)
