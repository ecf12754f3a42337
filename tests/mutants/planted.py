"""Bugs that tests of the runner plant, what one of them comes to, and the page of results."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.jobs import HUNT, Outcome
from tests.mutants.mutant import Mutant

DOCS = Path(__file__).parents[2] / "docs" / "mutants.md"
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
