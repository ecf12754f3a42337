"""Every planted bug."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.errors import did_you_mean
from tests.mutants import (
    catalogue_caches,
    catalogue_cpu,
    catalogue_decode,
    catalogue_ends,
    catalogue_engine,
    catalogue_fused,
    catalogue_in_flight,
    catalogue_kernels,
    catalogue_moving,
    catalogue_ownership,
    catalogue_plan,
    catalogue_prefixes,
    catalogue_rows,
    catalogue_sampling,
    catalogue_speculation,
    catalogue_switches,
    catalogue_truncation,
    catalogue_windows,
)

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

CATALOGUE: tuple[Mutant, ...] = (
    *catalogue_ownership.MUTANTS,
    *catalogue_truncation.MUTANTS,
    *catalogue_plan.MUTANTS,
    *catalogue_moving.MUTANTS,
    *catalogue_in_flight.MUTANTS,
    *catalogue_kernels.MUTANTS,
    *catalogue_engine.MUTANTS,
    *catalogue_prefixes.MUTANTS,
    *catalogue_decode.MUTANTS,
    *catalogue_sampling.MUTANTS,
    *catalogue_speculation.MUTANTS,
    *catalogue_rows.MUTANTS,
    *catalogue_caches.MUTANTS,
    *catalogue_windows.MUTANTS,
    *catalogue_switches.MUTANTS,
    *catalogue_fused.MUTANTS,
    *catalogue_ends.MUTANTS,
    *catalogue_cpu.MUTANTS,
)


def find(name: str) -> Mutant:
    for mutant in CATALOGUE:
        if mutant.name == name:
            return mutant
    alike = did_you_mean(name, [mutant.name for mutant in CATALOGUE])
    raise KeyError(f"no mutant is called {name!r}{alike}")


NOT_PLANTED: dict[str, str] = {
    "Logits of the first rows for the requests whose prompts are complete": (
        "only the last row of a step can have an incomplete prompt, so the first rows are right"
    ),
    "Copy-on-write of a batch that drops its reference before it has a new block": (
        "the capacity was checked for the whole batch and other holders keep the block, so "
        "nothing differs; the single-token path, where it matters, has the bug planted"
    ),
    "Free blocks reused first in, first out": "another order of block ids, no bug",
    "A clone kernel that counts a block's elements in another order": (
        "source and target are read in the same order, so the copy is the same"
    ),
    "A compiled kernel reused for arguments of another kind (the launcher's memory)": (
        "Triton's interpreter compiles nothing; needs a GPU"
    ),
    "A graph that replays a step of another size, or rows it was captured with": (
        "without a GPU no graph is captured; the effect of a capture on live rows is planted, and "
        "simulated by a step on emptied rows"
    ),
    "A step that never ends": (
        "it takes a minute of every search; tests/run/test_watchdog.py has caches that hang"
    ),
    "A static cache in another dtype than the model (row 22)": (
        "the cache has the dtype of the model, and no option sets another"
    ),
    "A draft sampled with the noise of the first draft": (
        "one of two seeds found it, after 472 examples: drafts are rarely accepted where tokens "
        "are sampled; tests/engine/test_speculation.py always finds it"
    ),
    "Drafts of a sampling request verified as greedy in a step with a greedy request": (
        "three seeds of 882 examples did not find it: two requests rarely have drafts in one step "
        "where one of them samples; tests/decode/test_token_rows.py always finds it"
    ),
    "A slot entered after drafts with the token of the previous request": (
        "three seeds of 882 examples did not find it, for the same reason; "
        "tests/engine/test_speculation.py always finds it"
    ),
    "A step that increases the length of its padding row": (
        "a row is uploaded again when a sequence takes it, and all its blocks are scratch"
    ),
}
"""Changes that are not planted, with the reason."""
