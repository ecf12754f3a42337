"""This distribution's block manager on a simulated device, which is late."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.targets.roseinfer_kv import PerLayerManager
from roseinfer import AttentionPath
from tests.late_transfers import late_transfers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pytest_roseinfer import DeviceQueue, FastPath

_RING = 4
"""Buffers for indices: so few are soon used again."""


class QueuedManager(PerLayerManager):
    """It writes by torch operations, since kernels are not held back."""

    paths: ClassVar[dict[str, FastPath]] = {
        name: path
        for name, path in PerLayerManager.paths.items()
        if {"triton": False} not in path.never_with
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **PerLayerManager.option_choices,
        "triton": (False,),
    }
    gather_in_flight = True

    def use_queue(self, queue: DeviceQueue) -> None:
        with late_transfers(queue, _RING):
            self.make(self.spec)
        queue.on_device(self.manager.keys, self.manager.values)

    def path_counts(self) -> Mapping[str, int]:
        """Attention has one path here, so there is none to compare it with."""
        counts = dict(super().path_counts())
        counts.pop(AttentionPath.REFERENCE.value, None)
        return counts
