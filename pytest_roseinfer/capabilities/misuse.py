"""Kinds of bad calls, which capabilities register.

A bad call is built for the current state of a cache, but its description does not depend on that
state. In a wrong list of blocks, the last block is the wrong one: a cache that checks blocks while
it processes them has changed the others by then.
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

UNKNOWN_SEQ, OTHER_UNKNOWN_SEQ = (1 << 15) - 1, (1 << 15) - 2
"""Names that no history uses for a sequence."""

Call = tuple[str, Callable[[], object]]
"""The description of a call, and a function that makes it."""


@dataclass(frozen=True, slots=True)
class MisuseState:
    """A cache to misuse, and the oracle of its contents."""

    adapter: Any
    spec: CacheSpec
    oracle: Oracle

    def freed(self) -> list[int]:
        return [seq for seq in self.oracle.lives if seq not in self.oracle.named]

    @property
    def live(self) -> list[int]:
        absent = {*self.oracle.absent, *self.oracle.ended}
        return [seq for seq in self.oracle.readable if seq not in absent]

    def gather_absent(self, seqs: Sequence[int]) -> Iterator[Call]:
        """Yield a call that gathers the last of these absent sequences, if there is one."""
        for seq in seqs[-1:]:
            call = partial(self.adapter.gather, seq, self.last)
            yield f"gather of a sequence that is {self.oracle.absent[seq].description}", call

    def tokens(self, rows: int) -> torch.Tensor:
        spec = self.spec
        shape = (spec.num_layers, rows, spec.num_heads, spec.head_dim)
        rounded = self.adapter.tolerance.get(spec.dtype)
        dtype = getattr(torch, rounded.tensors if rounded else spec.dtype)
        return torch.ones(shape, dtype=dtype, device=spec.device)

    @property
    def last(self) -> int:
        """The last layer, which a cache that checks only its first one does not look at."""
        return self.spec.num_layers - 1

    def tables(self, layer: int) -> list[list[int]]:
        """Return the blocks of each sequence that has some, the newest sequence first."""
        shown = [self.adapter.table(seq, layer) for seq in self.live]
        tables = [[block for block in table if block is not None] for table in shown]
        return [table for table in reversed(tables) if table]

    def newest_length(self) -> int:
        """Return the number of tokens of the newest sequence that has some."""
        return next(filter(None, map(self.oracle.length, reversed(self.live))))


@dataclass(frozen=True, slots=True)
class Misuse:
    """A kind of bad calls."""

    name: str
    """Its name in ``standard_bad_calls``."""
    needs: frozenset[str]
    """The methods that an adapter must define for it."""
    make_calls: Callable[[MisuseState], Iterator[Call]]
    """Function that yields the calls; none if the state does not allow this misuse."""


def misuse(
    *needs: str, name: str = ""
) -> Callable[[Callable[[MisuseState], Iterator[Call]]], Misuse]:
    """Turn a function into a kind of bad calls, named after the function unless ``name`` is set."""
    return lambda make_calls: Misuse(name or make_calls.__name__, frozenset(needs), make_calls)


def catalogue(adapter: type[Any]) -> Mapping[str, Misuse]:
    """Return the kinds of bad calls of an adapter's capabilities, by name."""
    return {each.name: each for one in adapter.capabilities for each in one.misuse}


def standard_bad_calls(at: MisuseState) -> Iterator[BadCall]:
    """Yield the standard bad calls that the adapter declares."""
    known_misuse = catalogue(type(at.adapter))
    for name in at.adapter.standard_bad_calls:
        for description, call in known_misuse[name].make_calls(at):
            yield BadCall(description, call, at.adapter.bad_call_errors)
