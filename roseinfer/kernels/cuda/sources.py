"""The text of kernels in CUDA C++, which is put together of parts."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def part(package: str, name: str) -> str:
    """Return a part of a source, a file in the folder ``source`` of a package."""
    return (files(package) / "source" / f"{name}.cu").read_text()


def machine(*names: str) -> list[str]:
    """Return the parts that say what the machine does; a CPU has others in their place."""
    return [part(__package__, name) for name in names]


def shared() -> list[str]:
    """Return the parts that all kernels have, on any machine."""
    return [part(__package__, name) for name in ("arithmetic", "norm", "barriers", "context_parts")]
