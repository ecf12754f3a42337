"""Environment of a run besides its tests: device, versions and environment variables."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer.settings import Settings

_PREFIXES = ("ROSEINFER_", "ROSELLM_", "TRITON_", "HYPOTHESIS_", "PYTORCH_", "TORCH_")
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTEST_ADDOPTS",
)
_KEY = "ROSEINFER_API_KEY"
"""Variable with the key of a server under test; never printed."""
_OWN = ("roseinfer", "torch", "triton", "hypothesis", "pytest")


def variables() -> dict[str, str]:
    """Return the environment variables that affect a run."""
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and name != _KEY
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that the harness needs."""
    return {name: number for name in _OWN if (number := _version(name))}


def version() -> str:
    """Return the name and version of this distribution."""
    return f"roseinfer {_version('roseinfer')}"


@cache
def distribution_of(target: str) -> str:
    """Return name and version of the distribution that has ``package.module:Class``, or ""."""
    package = target.partition(":")[0].partition(".")[0]
    if found_version := _version(package):
        return f"{package} {found_version}"
    # The slow way, since it reads the file list of every installed distribution.
    owners = _owners(package) or _editable_owners(package)
    return ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(owners))


def _owners(package: str) -> list[str]:
    """Return the distributions whose file list has a file of ``package``.

    ``packages_distributions`` checks that each listed file exists, which takes seconds. A
    distribution lists files of its own folder, and most packages under test are in a folder
    without distributions.
    """
    of_package = re.compile(rf"^{re.escape(package)}([/.]|$)", re.MULTILINE)
    folders = {Path(place).parent for place in _places(package)}
    files = (
        (each.name, each.read_text("RECORD") or each.read_text("top_level.txt") or "")
        for each in metadata.distributions()
        if Path(str(each.locate_file(""))) in folders
    )
    return [name for name, listed in files if of_package.search(listed)]


def _editable_owners(package: str) -> list[str]:
    """Return the distributions that were installed from a folder that contains ``package``."""
    places = _places(package)
    owners = []
    for distribution in metadata.distributions() if places else ():
        source = json.loads(distribution.read_text("direct_url.json") or "{}")
        path = urlsplit(source.get("url", "")).path
        if path and any(Path(place).is_relative_to(url2pathname(path)) for place in places):
            owners.append(distribution.name)
    return owners


def _places(package: str) -> list[str]:
    """List the folders of a package, or the file of a module."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    file = [spec.origin] if spec.origin else []
    return list(spec.submodule_search_locations or file)


def describe_run(settings: Settings) -> list[str]:
    """Return the header lines with the search settings of this run."""
    kind = "server" if settings.endpoint else "device"
    lines = [
        f"roseinfer: {kind} {describe_device(settings)}, profile {settings.profile} "
        f"({settings.examples} examples of up to {settings.steps} steps), seed {settings.seed}, "
        f"required paths {'on' if settings.require_paths else 'off'}"
    ]
    if relevant := variables():
        shown = " ".join(f"{name}={text}" for name, text in relevant.items())
        lines.append(f"roseinfer: environment {shown}")
    return lines


def describe_device(settings: Settings) -> str:
    """Name the device of a run's targets, or the server: its device is unknown."""
    if settings.endpoint:
        return str(settings.endpoint)
    if settings.gpu:
        import torch

        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(settings.gpu_index or 0)
        return f"{settings.device} ({f'{count} x ' if count > 1 else ''}{name})"
    interpreted = os.environ.get("TRITON_INTERPRET", "1") not in ("", "0")
    return settings.device + (" (Triton interpreted)" if interpreted else "")


def describe_target(target: str) -> str:
    distribution = distribution_of(target)
    return f"{target} ({distribution})" if distribution else target


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


# Provenance of measurements: commit, machine and versions.


_LIBRARIES = ("torch", "triton", "transformers", "numpy")
_CPUS = Path("/proc/cpuinfo")
_GPU = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def commit_of(folder: Path) -> tuple[str, bool]:
    """Return a folder's commit, and True if tracked files differ from it; "" outside of git."""
    git = ("git", "-C", str(folder))
    commit = _output(*git, "rev-parse", "--verify", "--quiet", "HEAD")
    return commit, bool(_output(*git, "status", "--porcelain", "--untracked-files=no"))


def environment_here(*, gpu: bool) -> dict[str, str]:
    """Return the properties of this machine that measurements depend on, by common names."""
    properties = {
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "gpu": "; ".join(_output(*_GPU).splitlines()) if gpu else "",
    }
    return {name: text for name, text in properties.items() if text}


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List the differences between two environments, a line for each."""
    names = dict.fromkeys([*before, *after])
    return [
        f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _cpu() -> str:
    """Return the processor's model name, or its family where only Linux has the model."""
    lines = _CPUS.read_text().splitlines() if _CPUS.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
