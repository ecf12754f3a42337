"""Bugs that tests of the runner plant, an outcome of one, and the pages about planted bugs."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.jobs import HUNT, Outcome
from tests.mutants.mutant import Mutant

_DOCS = Path(__file__).parents[2] / "docs"
RESULTS_PAGE = _DOCS / "lab" / "mutants.md"
"""Page of all results, which the command writes."""
SUMMARY_PAGE = _DOCS / "explanation" / "mutants.md"
"""Page of the figures and the options, for users."""
POOL = "roseinfer.kv.pool"
RELEASE = "self.refcounts[index] -= 1"
_HERE = (POOL, "BlockPool.drop", RELEASE)
EQUIVALENT = Mutant("equivalent", "Nothing.", *_HERE, "self.refcounts[index] += -1")
CRASH = Mutant(
    "crash",
    "Freeing ends the process.",
    *_HERE,
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
)
BROKEN = Mutant("broken", "It does not compile.", *_HERE, "nonlocal bound_nowhere")


def outcome(seed: int, *, killed: bool, kind: str = HUNT, examples: int = 3) -> Outcome:
    return Outcome(EQUIVALENT.name, kind, seed, killed, "histories", "what", examples, 9, 0.5)
