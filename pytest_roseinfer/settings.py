"""The settings of a run: one frozen value, built once from options and ini file."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

SHIPPED_TARGETS = (
    # First what takes longest, so that two workers end at the same time.
    "pytest_roseinfer.targets.roseinfer_engine:RoseinferEngine",
    "pytest_roseinfer.targets.roseinfer_kv:GroupedManager",
    "pytest_roseinfer.targets.roseinfer_kv:PerLayerManager",
    "pytest_roseinfer.targets.roseinfer_kv:WindowedManager",
)

ENDPOINT_TARGET = "pytest_roseinfer.endpoint.served_engine:ServedEngine"

STEP_SECONDS = 60.0
"""Processor time, some thousand times the usual: the first step may compile kernels."""


class Profile(NamedTuple):
    """How hard to look."""

    examples: int
    """Histories for each search."""
    steps: int
    """The most steps of one history."""
    search_seconds: float = 0.0
    """The time for the searches of one test; 0 for any."""


PROFILES = {
    # Seconds, for the edit-test loop.
    "dev": Profile(examples=100, steps=12, search_seconds=120.0),
    # A minute or two: what a change must pass.
    "ci": Profile(examples=500, steps=20, search_seconds=600.0),
    # As long as a night allows: rare coincidences of small probability.
    "nightly": Profile(examples=10_000, steps=40),
}


def harder_than(profile: str) -> str:
    """Return the option that searches harder than a profile."""
    names = [*PROFILES]
    after = names[names.index(profile) + 1 :]
    return f"--roseinfer-profile={after[0]}" if after else "more --roseinfer-examples"


_T = TypeVar("_T")


class Part(NamedTuple):
    """Which part of a test's searches a process takes, where several share them."""

    number: int = 1
    of: int = 1

    def share_of(self, aims: Sequence[_T]) -> Sequence[_T]:
        """Choose from all that searches aim at: what aims at one path compiles the same kernels."""
        return aims[self.number - 1 :: self.of]

    def __str__(self) -> str:
        return f"{self.number}of{self.of}"


RATE = 1000.0
"""Requests a second for a server of this machine: those of a mix are served together then."""
POLITE_RATE = 50.0
"""Requests a second that a server of another machine does not mind."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that is tested over HTTP."""

    url: str
    model: str = ""
    """The name to ask for; the first that the server names, if empty."""
    key: str = field(default="", repr=False)
    rate: float = RATE
    """The most requests that are opened in a second."""
    anywhere: bool = False
    """The command line says that it may be another machine."""

    @property
    def options(self) -> list[str]:
        """Return the words of a command line that name it, which have no key in them."""
        words = ["--roseinfer-endpoint", self.url]
        words += ["--roseinfer-model", self.model] if self.model else []
        words += ["--roseinfer-rate", str(self.rate)]
        return words + ["--roseinfer-endpoint-anywhere"] * self.anywhere

    def __str__(self) -> str:
        return f"{self.url}, model {self.model or 'that it names first'}"


@dataclass(frozen=True, slots=True)
class Timing:
    """The options about timing decode steps."""

    against: str = ""
    noise_floor: bool = False
    report_slower: bool = False
    seconds: float | None = None
    """A comparison ends by then; None where the marker or the default says."""
    tpot: str | None = None
    update_tpot: bool = False
    folder: str | None = None
    """The folder of ``--roseinfer-timings``."""

    @property
    def paired(self) -> bool:
        """True if two sides are compared."""
        return self.noise_floor or bool(self.against)

    @property
    def requested(self) -> bool:
        return self.paired or self.tpot is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """What the options and the ini file said."""

    profile: str = "dev"
    examples: int = PROFILES["dev"].examples
    steps: int = PROFILES["dev"].steps
    step_seconds: float = STEP_SECONDS
    """The processor time that a step may take; 0 for any."""
    search_seconds: float = PROFILES["dev"].search_seconds
    """The time for the searches of one test; 0 for any."""
    seed: int | None = None
    part: Part = field(default_factory=Part)
    gpu: bool = False
    gpu_index: int | None = None
    """The GPU of this worker of pytest-xdist; None if there are no workers."""
    require_paths: bool = True
    fast_interpreter: bool = False
    """Shortcuts in Triton's interpreter for all targets, and for checks of work."""
    targets: tuple[str, ...] = SHIPPED_TARGETS
    endpoint: Endpoint | None = None
    """The server of ``--roseinfer-endpoint``, whose target is the only one then."""
    named_targets: tuple[str, ...] = ()
    """The targets of the command line, which this run must therefore check."""
    reports: tuple[str, ...] = ()
    failures_dir: str | None = None
    costs: str | None = None
    """The file of baselines for the work of steps; None for one beside each test's file."""
    costs_requested: bool = False
    """The command line asks for that gate, which this run must therefore apply."""
    update_costs: bool = False
    timing: Timing = field(default_factory=Timing)

    @property
    def chosen_targets(self) -> tuple[str, ...]:
        """The targets, unless they are those that the plugin ships."""
        return () if self.targets == SHIPPED_TARGETS else self.targets

    def search_ends(self) -> float:
        """Return when a test that begins now must have searched, on the clock of ``monotonic``."""
        return monotonic() + self.search_seconds if self.search_seconds else math.inf

    @property
    def device(self) -> str:
        if not self.gpu:
            return "cpu"
        return "cuda" if self.gpu_index is None else f"cuda:{self.gpu_index}"


_DEFAULTS = Settings()
_current = _DEFAULTS


def require_plugin() -> None:
    """Fail a test of a pytest whose plugin is off: nobody would count what the test reaches."""
    if "PYTEST_CURRENT_TEST" not in os.environ or "_pytest.main" not in sys.modules:
        return  # called by a script, which judges for itself
    if _current is not _DEFAULTS:  # the plugin sets them when a run is configured
        return
    import pytest

    pytest.fail(
        "pytest's plugin roseinfer is off (-p no:roseinfer, PYTEST_DISABLE_PLUGIN_AUTOLOAD): "
        "nobody would notice what this test does not reach. -p pytest_roseinfer.plugin turns it on",
        pytrace=False,
    )


def current() -> Settings:
    """Return the settings of this run, or the defaults outside a pytest run."""
    return _current


def set_current(settings: Settings) -> None:
    global _current
    _current = settings


def choose_kernel_runtime() -> None:
    """Without a GPU, let Triton kernels run under its interpreter.

    Only what uses the harness calls this, ahead of the first cache: other tests of the same run
    may import Triton for a GPU.
    """
    if not _current.gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
