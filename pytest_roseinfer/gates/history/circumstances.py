"""What a run's figures depend on besides the code: the commit says which, the machine and versions
say where."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIBRARIES = ("torch", "triton", "transformers", "numpy")
_CPUS = Path("/proc/cpuinfo")
_GPU = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def commit_of(folder: Path) -> tuple[str, bool]:
    """Return the commit of a folder, and whether files differ from it; "" outside of git."""
    git = ("git", "-C", str(folder))
    commit = _output(*git, "rev-parse", "--verify", "--quiet", "HEAD")
    return commit, bool(_output(*git, "status", "--porcelain", "--untracked-files=no"))


def environment_here(*, gpu: bool) -> dict[str, str]:
    """Return what decides about figures on this machine, each by a name that people know."""
    found = {
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "gpu": "; ".join(_output(*_GPU).splitlines()) if gpu else "",
    }
    return {name: what for name, what in found.items() if what}


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Say what differs between two environments, a line for each."""
    names = dict.fromkeys([*before, *after])
    return [
        f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    """Return the processor's model; Linux alone says more than its family."""
    lines = _CPUS.read_text().splitlines() if _CPUS.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
