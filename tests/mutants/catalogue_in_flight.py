"""Bugs in what is done while the device is late, which show on a simulated one."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STORAGE = "roseinfer.kv.storage"
QUEUED = "tests.mutants.queued_manager:QueuedManager"
_WAIT = (
    "            self._half_left[entered].synchronize()  # at once, where it was never recorded\n"
)

MUTANTS = (
    Mutant(
        "index-buffer-filled-early",
        "An index buffer is filled again though the device may not have copied it.",
        _STORAGE,
        _WAIT,
        "",
        targets=(QUEUED,),
    ),
    Mutant(
        "half-a-ring-marked-on-entry",
        "Half of the index buffers count as copied that were when the first of them was filled.",
        _STORAGE,
        "            self._transfers.record(self._half_left[1 - entered])\n" + _WAIT,
        "            self._half_left[entered].synchronize()\n"
        "            self._transfers.record(self._half_left[entered])\n",
        targets=(QUEUED,),
    ),
)
