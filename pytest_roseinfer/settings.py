"""How a run was asked to go: one frozen value, built once from options and ini."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.adapter import KVCacheAdapter

SHIPPED_TARGETS = (
    "pytest_roseinfer.targets.roseinfer_kv:PerLayerManager",
    "pytest_roseinfer.targets.roseinfer_kv:GroupedManager",
)


@dataclass(frozen=True, slots=True)
class Profile:
    """How hard to look."""

    examples: int
    """Histories for each search."""
    steps: int
    """Most steps of one history."""


PROFILES = {
    # Seconds, for the edit-test loop.
    "dev": Profile(examples=100, steps=12),
    # A minute or two: what a change must pass.
    "ci": Profile(examples=500, steps=20),
    # As long as a night allows: rare coincidences of small probability.
    "nightly": Profile(examples=10_000, steps=40),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the options and the ini file said."""

    profile: str = "dev"
    examples: int = PROFILES["dev"].examples
    steps: int = PROFILES["dev"].steps
    seed: int | None = None
    gpu: bool = False
    require_paths: bool = True
    targets: tuple[str, ...] = SHIPPED_TARGETS
    failures_dir: str | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"


_current = Settings()


def current() -> Settings:
    """The settings of this run; the defaults outside a pytest run."""
    return _current


def set_current(settings: Settings) -> None:
    global _current
    _current = settings


def choose_kernel_runtime() -> None:
    """Without a GPU, let Triton kernels run under its interpreter.

    Called before the first cache is built, and only by what uses the harness: other tests
    in the same run that import Triton first are left alone.
    """
    if not _current.gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def load_target(name: str) -> type[KVCacheAdapter]:
    """The adapter class that ``package.module:Class`` names."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"target {name!r}: expected package.module:Class")
    choose_kernel_runtime()
    target: type[KVCacheAdapter] = getattr(importlib.import_module(module), attribute)
    return target
