"""Baseline of the search: random operations without its shaping.

They are of the same kinds, on caches of the same sizes, with the same checks after them. They have
no shaping: every choice is uniform and independent of earlier ones, lengths do not depend on block
sizes, and no history aims at a path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.payload import LAYOUTS
from pytest_roseinfer.capabilities.prefixes import BeginWith, LookUp
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import (
    Append,
    AppendMany,
    AppendPadded,
    Fill,
    Prefill,
    Reserve,
)
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.run.machine import run_history
from tests.mutants.random_search import search_at_random

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch
    from tests.mutants.hunt import Failure
    from tests.mutants.tally import Tally

_STEPS = 20
_MAX_HEADS = 4
_MAX_DIMS = 96
_MAX_TOKENS = 16
"""Most tokens of a block."""
_MAX_BLOCKS = 64


def run(
    targets: Sequence[type[KVCacheAdapter]], seed: int, operations: int, tally: Tally
) -> Failure | None:
    """Run histories of random operations until one fails or the number of operations is reached."""
    tally.check = "random operations"
    return search_at_random(
        targets, random_history, run_history, seed=seed, operations=operations, tally=tally
    )


def random_history(rng: random.Random, target: type[KVCacheAdapter]) -> History:
    """Draw operations one by one, independently; only sequence names must be valid."""
    spec = CacheSpec(
        num_layers=rng.randint(1, 3),
        num_heads=rng.randint(1, _MAX_HEADS),
        head_dim=rng.randint(1, _MAX_DIMS),
        block_size=rng.randint(1, _MAX_TOKENS),
        num_blocks=rng.randint(1, _MAX_BLOCKS),
        dtype=rng.choice(target.dtypes),
        options=_options(rng, target),
    )
    texts = _texts(rng) if "use_tokens" in target.abilities else ()
    writer = _Writer(rng, target, Oracle.of(target, spec, texts))
    for _ in range(_STEPS):
        writer.take(rng.choice(writer.draw_options())())
    while writer.waiting:
        writer.take(Fill())
    return History(spec, tuple(writer.steps), finite=rng.random() < 0.5, texts=texts)


def _texts(rng: random.Random) -> tuple[Branch, ...]:
    more = range(1, rng.randint(1, 4))
    return ((0, 0), *((rng.randrange(text), rng.randint(0, 2 * _MAX_TOKENS)) for text in more))


def _options(rng: random.Random, target: type[KVCacheAdapter]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in target.option_choices.items()}


@dataclass(slots=True)
class _Writer:
    """Draws operations; the oracle only provides the sequences."""

    rng: random.Random
    target: type[KVCacheAdapter]
    oracle: Oracle
    steps: list[Operation] = field(default_factory=list)
    waiting: list[set[int]] = field(default_factory=list)
    names: int = 0

    def draw_options(self) -> list[Callable[[], Operation]]:
        can = self.target.abilities
        offered: list[tuple[str, Callable[[], Operation]]] = [
            ("append", self._append),
            ("prefill", lambda: Prefill(self._new(), self._count(), self._layout())),
            ("append_many", self._append_many),
            ("append_padded", self._append_padded),
            ("reserve", self._reserve),
            ("set_options", lambda: SetOptions(_options(self.rng, self.target))),
            ("look_up", lambda: LookUp(self._new(), self._count())),
        ]
        if self.oracle.pending_seqs:
            offered.append(
                ("begin_with", lambda: BeginWith(self.rng.choice(self.oracle.pending_seqs)))
            )
        if self._live():
            offered += [
                ("fork", lambda: Fork(self.rng.choice(self._live()), self._new())),
                ("free", lambda: Free(self.rng.choice(self._live()))),
                ("truncate", self._truncate),
            ]
        if self.waiting:
            offered.append(("fill", Fill))
        return [move for name, move in offered if name == "append" or name in can]

    def take(self, step: Operation) -> None:
        fits = step.fits(self.oracle)
        if not fits and "ledger" not in self.target.abilities:
            return  # the cache may use more blocks than the oracle knows
        step.apply(self.oracle)
        if isinstance(step, Reserve) and fits:
            self.waiting.append(set(step.seqs))
        elif isinstance(step, Fill):
            self.waiting.pop(0)
        self.steps.append(step)

    def _live(self) -> list[int]:
        return [seq for seq in self.oracle.sequences if seq not in set().union(*self.waiting)]

    def _new(self) -> int:
        self.names += 1
        return self.names - 1

    def _rows(self) -> tuple[int, ...]:
        names = [*self._live(), self._new()]
        return tuple(self.rng.sample(names, self.rng.randint(1, len(names))))

    def _count(self) -> int:
        return self.rng.randint(1, 2 * _MAX_TOKENS)

    def _layout(self) -> str:
        return self.rng.choice(LAYOUTS)

    def _truncate(self) -> Operation:
        seq = self.rng.choice(self._live())
        return Truncate(seq, self.rng.randint(0, self.oracle.length(seq)))

    def _append(self) -> Operation:
        return Append(self._rows(), self._layout())

    def _append_many(self) -> Operation:
        rows = self._rows()
        return AppendMany(rows, tuple(self._count() for _ in rows), self._layout())

    def _append_padded(self) -> Operation:
        rows: list[int | None] = [*self._rows(), None]
        self.rng.shuffle(rows)
        return AppendPadded(tuple(rows), self._layout())

    def _reserve(self) -> Operation:
        rows = self._rows()
        return Reserve(rows, tuple(self._count() for _ in rows), self._layout())
