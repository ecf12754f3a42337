"""The processes of replicas, as this machine shows them."""

from __future__ import annotations

from pathlib import Path

_TITLE = b"ray::ServeReplica:roseinfer:Replica"


def replicas_of(process: int) -> list[int]:
    """Return the replicas that a server's process started, by their process ids."""
    return [each for each in below(process) if _said(each, "cmdline").startswith(_TITLE)]


def below(process: int) -> list[int]:
    """Return all processes that came of one, however many steps below it."""
    parents = {int(each.name): _parent(int(each.name)) for each in Path("/proc").glob("[0-9]*")}
    found, due = list[int](), [process]
    while due:
        due = [each for each, parent in parents.items() if parent in due]
        found += due
    return found


def runs(process: int) -> bool:
    """Return whether a process is there, and no more than a name that nobody asked for."""
    return _said(process, "stat").rpartition(b") ")[2][:1] not in (b"", b"Z")


def _parent(process: int) -> int:
    return int((_said(process, "stat").rpartition(b") ")[2].split() or [b"", b"0"])[1])


def _said(process: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{what}").read_bytes()
    except OSError:
        return b""
