"""Calls that a cache must refuse: how a capability makes them up.

A bad call is made up for the state that a cache is in, and its words do not depend on that state.
Where a list of blocks is wrong, its last block is: a cache that checks one after the other has
done half of the work by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.cache_data import BadCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.oracle.oracle import Oracle
else:
    from pytest_roseinfer.capabilities import torch

NEVER, NEVER_EITHER = (1 << 15) - 1, (1 << 15) - 2
"""Names that no history gives to a sequence."""

Call = tuple[str, Callable[[], object]]
"""A call in words, and a function that makes it."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A cache to misuse, and what it holds."""

    adapter: Any
    spec: CacheSpec
    oracle: Oracle

    def freed(self) -> list[int]:
        return [seq for seq in self.oracle.lives if seq not in self.oracle.named]

    @property
    def live(self) -> list[int]:
        absent = self.oracle.absent
        return [seq for seq in self.oracle.sequences if seq not in absent]

    def gather_absent(self, seqs: Sequence[int]) -> Iterator[Call]:
        """Yield a call that gathers the last of some sequences that are absent."""
        for seq in seqs[-1:]:
            call = partial(self.adapter.gather, seq, self.last)
            yield f"gather of a sequence that is {self.oracle.absent[seq].words}", call

    def tokens(self, rows: int) -> torch.Tensor:
        spec = self.spec
        shape = (spec.num_layers, rows, spec.num_heads, spec.head_dim)
        rounded = self.adapter.tolerance.get(spec.dtype)
        dtype = getattr(torch, rounded.tensors if rounded else spec.dtype)
        return torch.ones(shape, dtype=dtype, device=spec.device)

    @property
    def last(self) -> int:
        """The last layer: a cache that checks only its first one does not refuse."""
        return self.spec.num_layers - 1

    def tables(self, layer: int) -> list[list[int]]:
        """The blocks of sequences that have some, the newest sequence first."""
        shown = [self.adapter.table(seq, layer) for seq in self.live]
        tables = [[block for block in table if block is not None] for table in shown]
        return [table for table in reversed(tables) if table]

    def newest_length(self) -> int:
        """The number of tokens of the newest sequence that has blocks."""
        return next(filter(None, map(self.oracle.length, reversed(self.live))))


@dataclass(frozen=True, slots=True)
class Misuse:
    """A kind of bad calls."""

    name: str
    """Its name in ``standard_bad_calls``."""
    needs: frozenset[str]
    """The methods that an adapter must define for it."""
    made_up: Callable[[Situation], Iterator[Call]]
    """Yields nothing where the state has nothing to misuse in this way."""


def misuse(
    *needs: str, name: str = ""
) -> Callable[[Callable[[Situation], Iterator[Call]]], Misuse]:
    """Make a function a kind of bad calls, of the same name where none is given."""
    return lambda made_up: Misuse(name or made_up.__name__, frozenset(needs), made_up)


def catalogue(adapter: type[Any]) -> Mapping[str, Misuse]:
    """Return the kinds of bad calls that the capabilities of an adapter know, by their names."""
    return {each.name: each for one in adapter.capabilities for each in one.misuse}


def standard_bad_calls(at: Situation) -> Iterator[BadCall]:
    """Make up those that the adapter names."""
    known = catalogue(type(at.adapter))
    for name in at.adapter.standard_bad_calls:
        for words, call in known[name].made_up(at):
            yield BadCall(words, call, at.adapter.bad_call_errors)
