"""Settings of a run: one frozen value, built once from the options and the ini file."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SHIPPED_TARGETS = (
    # Longest first, so that two workers finish at about the same time.
    "pytest_roseinfer.targets.roseinfer_engine:RoseinferEngine",
    "pytest_roseinfer.targets.roseinfer_kv:GroupedManager",
    "pytest_roseinfer.targets.roseinfer_kv:PerLayerManager",
    "pytest_roseinfer.targets.roseinfer_kv:WindowedManager",
)

KEPT_FAILURES = "roseinfer-kept"
"""Folder of kept failures, at the project's root."""
KNOWN_FINDINGS = "roseinfer-known.toml"
"""Default file of known findings, at the project's root."""

ENDPOINT_TARGET = "pytest_roseinfer.endpoint.served_engine:ServedEngine"

STEP_SECONDS = 60.0
"""Default limit on a step's processor time, in seconds.

About a thousand times the usual step, because the first one may compile kernels.
"""


class Profile(NamedTuple):
    """Search effort."""

    examples: int
    """Histories per search."""
    steps: int
    """Maximum steps of one history."""
    further_seconds: float = math.inf
    """Seconds of a test's further turns, for paths that its examples reached too rarely."""


PROFILES = {
    # A few seconds, for the edit-test loop.
    "dev": Profile(examples=100, steps=12, further_seconds=120.0),
    # A minute or two: the bar for a change.
    "ci": Profile(examples=500, steps=20, further_seconds=600.0),
    # Hours: finds rare coincidences.
    "nightly": Profile(examples=10_000, steps=40),
}


def harder_than(profile: str) -> str:
    """Return the option that searches harder than the named profile."""
    names = [*PROFILES]
    after = names[names.index(profile) + 1 :]
    return f"--roseinfer-profile={after[0]}" if after else "more --roseinfer-examples"


_T = TypeVar("_T")


class Part(NamedTuple):
    """Share of a test's searches that this process runs, when several processes split them."""

    number: int = 1
    of: int = 1

    def share_of(self, aims: Sequence[_T]) -> Sequence[_T]:
        """Return this part's share of the search aims.

        Splitting by aim keeps compilation cheap: searches of one path compile the same kernels.
        """
        return aims[self.number - 1 :: self.of]

    def __str__(self) -> str:
        return f"{self.number}of{self.of}"


RATE = 1000.0
"""Requests per second for a server on this machine; high enough that a mix's requests overlap."""
POLITE_RATE = 50.0
"""Requests per second for a server on another machine, low enough not to burden it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server to test over HTTP."""

    url: str
    model: str = ""
    """Model name sent with requests; empty means the first model that the server lists."""
    key: str = field(default="", repr=False)
    rate: float = RATE
    """Maximum requests opened per second."""
    allow_remote: bool = False
    """True if the command line allows a server on another machine."""

    @property
    def options(self) -> list[str]:
        """Return the command-line arguments that select this server, without its key."""
        words = ["--roseinfer-endpoint", self.url]
        words += ["--roseinfer-model", self.model] if self.model else []
        words += ["--roseinfer-rate", str(self.rate)]
        return words + ["--roseinfer-allow-remote"] * self.allow_remote

    def __str__(self) -> str:
        return f"{self.url}, model {self.model or '(the first that it lists)'}"


@dataclass(frozen=True, slots=True)
class KnownFinding:
    """Failure that is expected, by its digest: one entry of ``roseinfer-known.toml``."""

    digest: str
    target: str
    """Target, as ``package.module:Class``."""
    test: str
    """Test that must find it, such as ``test_histories``; others may."""
    reason: str
    link: str = ""
    strict: bool | None = None
    """True if the test fails once it does not find it; None for pytest's own setting."""

    def __str__(self) -> str:
        link = f" ({self.link})" if self.link else ""
        return f"known finding {self.digest}: {self.reason}{link}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Options for timing decode steps."""

    against: str = ""
    noise_floor: bool = False
    report_slower: bool = False
    seconds: float | None = None
    """Time limit in seconds of a comparison; None uses the marker's value or the default."""
    tpot: str | None = None
    update_tpot: bool = False
    folder: str | None = None
    """Folder of ``--roseinfer-timings``."""

    @property
    def paired(self) -> bool:
        """True if two sides are compared."""
        return self.noise_floor or bool(self.against)

    @property
    def requested(self) -> bool:
        return self.paired or self.tpot is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """All options of a run, from the command line and the ini file."""

    profile: str = "dev"
    examples: int = PROFILES["dev"].examples
    steps: int = PROFILES["dev"].steps
    step_seconds: float = STEP_SECONDS
    """Processor seconds that a step may take; 0 means unlimited."""
    search_seconds: float = 0.0
    """Seconds for all searches of one test; 0 means unlimited."""
    further_seconds: float = PROFILES["dev"].further_seconds
    """Seconds for the further turns of one test."""
    seed: int | None = None
    reuses_examples: bool = False
    """True if searches try failing examples of earlier runs first, from Hypothesis's database; with
    a given seed, they do not, so that the run can be repeated."""
    part: Part = field(default_factory=Part)
    gpu: bool = False
    gpu_index: int | None = None
    """GPU of this pytest-xdist worker; None without workers."""
    require_paths: bool = True
    fast_interpreter: bool = False
    """Shortcuts in Triton's interpreter, for all targets and for the work gate."""
    targets: tuple[str, ...] = SHIPPED_TARGETS
    endpoint: Endpoint | None = None
    """Server of ``--roseinfer-endpoint``; if set, it is the only target."""
    named_targets: tuple[str, ...] = ()
    """Targets named on the command line; a run that does not check them fails."""
    reports: tuple[str, ...] = ()
    known_findings: Mapping[str, KnownFinding] = field(default_factory=dict)
    """Failures that are expected, by digest; empty with ``--runxfail``."""
    known_file: str = KNOWN_FINDINGS
    """File of known findings, as messages name it."""
    failures_dir: str | None = None
    kept_dir: str | None = None
    """Folder of kept failures, whose traces every run replays; None if none is replayed."""
    keeps_failures: bool = False
    """True if new failures are written to ``kept_dir``."""
    costs: str | None = None
    """Baseline file of the work gate; None means one in the folder of each test file."""
    costs_requested: bool = False
    """True if the command line names the baseline file; a run that compares no step then fails."""
    update_costs: bool = False
    timing: Timing = field(default_factory=Timing)
    announce: Callable[[str], object] = field(default=len, repr=False, compare=False)
    """Function that prints a line during a test; the default prints nothing."""

    @property
    def kept_traces(self) -> list[Path]:
        """Traces of kept failures, of all targets."""
        return sorted(Path(self.kept_dir).glob("*.json")) if self.kept_dir else []

    @property
    def chosen_targets(self) -> tuple[str, ...]:
        """Targets that the user chose; empty if they are the plugin's own."""
        return () if self.targets == SHIPPED_TARGETS else self.targets

    def known_of(self, target: str) -> dict[str, KnownFinding]:
        """Return the known findings of a target, by digest."""
        every = self.known_findings.items()
        return {digest: each for digest, each in every if each.target == target}

    def search_ends(self) -> float:
        """Return the deadline for the searches of a test that starts now, in ``monotonic`` time."""
        return monotonic() + self.search_seconds if self.search_seconds else math.inf

    def further_ends(self, ends: float) -> float:
        """Return the deadline for further turns that start now, at most ``ends``."""
        return min(ends, monotonic() + self.further_seconds)

    @property
    def device(self) -> str:
        if not self.gpu:
            return "cpu"
        return "cuda" if self.gpu_index is None else f"cuda:{self.gpu_index}"


_DEFAULTS = Settings()
_current = _DEFAULTS


def require_plugin() -> None:
    """Fail the current test if pytest runs without this plugin, which counts coverage."""
    if "PYTEST_CURRENT_TEST" not in os.environ or "_pytest.main" not in sys.modules:
        return  # called by a script, which does its own reporting
    if _current is not _DEFAULTS:  # the plugin replaces them when a run is configured
        return
    import pytest

    pytest.fail(
        "pytest plugin roseinfer is off (-p no:roseinfer, PYTEST_DISABLE_PLUGIN_AUTOLOAD): paths "
        "that this test does not reach would go unreported; turn it on with "
        "-p pytest_roseinfer.plugin",
        pytrace=False,
    )


def current() -> Settings:
    """Return the settings of this run, or the defaults outside a pytest run."""
    return _current


def set_current(settings: Settings) -> None:
    global _current
    _current = settings


def choose_kernel_runtime() -> None:
    """Run Triton kernels under Triton's interpreter if this run has no GPU.

    Called only by code that uses the harness, before it makes the first cache: other tests of the
    same run may import Triton for a GPU.
    """
    if not _current.gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
