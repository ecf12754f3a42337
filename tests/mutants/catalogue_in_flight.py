"""Bugs in what is done while the device is late, which show on a simulated one."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STORAGE = "roseinfer.kv.storage"
_READBACK = "roseinfer.decode.readback"
QUEUED = "tests.mutants.queued_manager:QueuedManager"
QUEUED_ENGINE = "tests.mutants.queued_engine:QueuedEngine"
_WAIT = (
    "            self._half_events[entered].synchronize()  # at once, where it was never recorded\n"
)

MUTANTS = (
    Mutant(
        "index-buffer-filled-early",
        "An index buffer is filled again though the device may not have copied it.",
        _STORAGE,
        "IndexStaging._next_buffer",
        "self._half_events[entered].synchronize()",
        "",
        targets=(QUEUED,),
    ),
    Mutant(
        "half-a-ring-marked-on-entry",
        "Half of the index buffers count as copied that were when the first of them was filled.",
        _STORAGE,
        "IndexStaging._next_buffer",
        """
        self._half_events[1 - entered].record(self._transfers.stream())
        self._half_events[entered].synchronize()
        """,
        """
        self._half_events[entered].synchronize()
        self._half_events[entered].record(self._transfers.stream())
        """,
        targets=(QUEUED,),
    ),
    Mutant(
        "tokens-read-before-they-land",
        "The host does not wait for the tokens of a step that is in flight.",
        _READBACK,
        "PendingReadback.wait",
        """
        if done is not None:
            done.synchronize()
        """,
        "",
        targets=(QUEUED_ENGINE,),
    ),
    Mutant(
        "tokens-land-when-the-step-is-done",
        "Tokens count as landed when the step is done, though the copy to the host is behind it.",
        _READBACK,
        "Readback.start",
        """
        host[:count].copy_(vector, non_blocking=True)
        if done is not None:
            done.record(self._transfers.stream())
        """,
        """
        if done is not None:
            done.record(self._transfers.stream())
        host[:count].copy_(vector, non_blocking=True)
        """,
        targets=(QUEUED_ENGINE,),
    ),
)
