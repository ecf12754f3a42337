"""Bugs with work in flight on the device, found on a simulated device."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STORAGE = "roseinfer.kv.storage"
_READBACK = "roseinfer.kv.transfers"
QUEUED = "tests.mutants.queued_manager:QueuedManager"
QUEUED_ENGINE = "tests.mutants.queued_engine:QueuedEngine"
_WAIT = (
    "            self._half_events[entered].synchronize()  # at once, where it was never recorded\n"
)

MUTANTS = (
    Mutant(
        "index-buffer-reused-early",
        "An index buffer is filled again before the device has copied it.",
        _STORAGE,
        "IndexStaging._next_buffer",
        "self._half_events[entered].synchronize()",
        "",
        targets=(QUEUED,),
    ),
    Mutant(
        "ring-event-recorded-on-entry",
        "The event of a half of the index buffers is recorded when its first is filled.",
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
        "tokens-read-before-the-readback",
        "The host does not wait for the tokens of a step in flight.",
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
        "readback-event-before-the-copy",
        "The event of a readback is recorded before its copy to the host.",
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
    Mutant(
        "readback-buffer-reused-in-flight",
        "The pinned buffer of a readback is reused before the host has read it.",
        _READBACK,
        "Readback.start",
        "return PendingReadback(buffer, count, self._buffers.append)",
        """
        self._buffers.append(buffer)
        return PendingReadback(buffer, count, len)
        """,
        targets=(QUEUED_ENGINE,),
    ),
    Mutant(
        "upload-buffer-reused-in-flight",
        "Columns are uploaded through one pinned buffer of each shape, whoever still reads it.",
        _READBACK,
        "Transfers.upload_columns",
        "host = self.host_buffer((len(columns), len(columns[0])), dtype)",
        """
        buffers = vars(self.stream()).setdefault("buffers", {})
        shape = len(columns), len(columns[0]), dtype
        host = buffers.setdefault(shape, self.host_buffer(shape[:2], dtype))
        """,
        targets=(QUEUED_ENGINE,),
    ),
)
