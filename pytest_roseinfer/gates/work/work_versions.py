"""The versions that a baseline holds for, as they stand in its file."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.work.step_work import NOTHING, PYTHON, TORCH, CannotCompare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def versions_here(keyed_by: Sequence[str]) -> Mapping[str, str]:
    """For each thing that counts can depend on, what it is in this run.

    Major and minor version: what a patch release changes of this would be a regression of it.
    """
    libraries = [f"{name} {_minor(name)}" for name in ("torch", *keyed_by)]
    return {
        PYTHON: f"python {sys.version_info.major}.{sys.version_info.minor}",
        TORCH: ", ".join(libraries),
        NOTHING: "any version",
    }


def _minor(distribution: str) -> str:
    try:
        return ".".join(metadata.version(distribution).split(".")[:2])
    except metadata.PackageNotFoundError:
        raise CannotCompare(f"keyed_by names {distribution}, which is not installed") from None
