"""This distribution's block manager on a simulated device that runs late."""

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
"""Number of index buffers, few enough for frequent reuse."""


class QueuedManager(PerLayerManager):
    """Manager that writes by torch operations, because the simulation does not delay kernels."""

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
        """Return counts without attention, which has only one path here."""
        counts = dict(super().path_counts())
        counts.pop(AttentionPath.REFERENCE.value, None)
        return counts
