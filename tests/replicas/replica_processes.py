"""Processes of replicas on this machine."""

from __future__ import annotations

from pathlib import Path

_TITLE = b"ray::ServeReplica:roseinfer:Replica"


def replicas_of(process: int) -> list[int]:
    """Return the process ids of the replicas that a server's process started."""
    return [
        each for each in descendants_of(process) if _read_proc(each, "cmdline").startswith(_TITLE)
    ]


def descendants_of(process: int) -> list[int]:
    """Return all descendants of a process."""
    parents = {int(each.name): _parent(int(each.name)) for each in Path("/proc").glob("[0-9]*")}
    descendants, current = list[int](), [process]
    while current:
        current = [each for each, parent in parents.items() if parent in current]
        descendants += current
    return descendants


def is_running(process: int) -> bool:
    """Return True for a process that exists and is not a zombie."""
    return _read_proc(process, "stat").rpartition(b") ")[2][:1] not in (b"", b"Z")


def _parent(process: int) -> int:
    return int((_read_proc(process, "stat").rpartition(b") ")[2].split() or [b"", b"0"])[1])


def _read_proc(process: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:
        return b""
