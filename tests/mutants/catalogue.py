"""Every planted bug."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer import did_you_mean
from tests.mutants import (
    catalogue_caches,
    catalogue_decode,
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
    *catalogue_fused.MUTANTS,
)


def find(name: str) -> Mutant:
    for mutant in CATALOGUE:
        if mutant.name == name:
            return mutant
    alike = did_you_mean(name, [mutant.name for mutant in CATALOGUE])
    raise KeyError(f"no mutant is called {name!r}{alike}")


NOT_PLANTED: dict[str, str] = {
    "Logits of the first rows for the requests whose prompts are complete": (
        "the one prompt that a step leaves incomplete is its last row, so they are the first rows"
    ),
    "Copy-on-write of a batch that drops its hold before it has a new block": (
        "the capacity was checked for the whole batch and other holders keep the block, so "
        "nothing differs; the single-token path, where it matters, has the bug planted"
    ),
    "Free blocks handed out first in, first out": "another order of block ids, no bug",
    "A clone kernel that counts a block's elements in another order": (
        "source and target are read in the same order, so the copy is the same"
    ),
    "A compiled kernel reused for arguments of another kind (the launcher's memory)": (
        "Triton's interpreter compiles nothing; needs a GPU"
    ),
    "A graph that replays a step of another size, or rows it was captured with": (
        "without a GPU nothing is captured; what a capture does to live rows is planted, and "
        "simulated by running the step on emptied rows"
    ),
    "A step that never ends": (
        "it takes a minute of every search; tests/run/test_watchdog.py has caches that hang"
    ),
    "A static cache in another dtype than the model (row 22)": (
        "the cache is made in the model's dtype, and there is no other place to say one"
    ),
    "A draft's place drawn with the noise of the first one's": (
        "of two seeds one found it, after 472 examples: hardly a draft is accepted where tokens "
        "are drawn; tests/engine/test_speculation.py finds it at once"
    ),
    "Drafts of a request that draws verified as greedy, beside another's that are": (
        "three seeds of 882 examples did not find it: two requests are hardly ever drafted in one "
        "step where one of them draws; tests/decode/test_token_rows.py finds it at once"
    ),
    "A slot entered, behind drafts, with the token of the request before": (
        "three seeds of 882 examples did not find it, for the same reason; "
        "tests/engine/test_speculation.py finds it at once"
    ),
    "A step that leaves its row of padding longer": (
        "a row is uploaded anew when a sequence takes it, and its blocks are all scratch"
    ),
}
"""Changes thought of and left out, with the reason."""
