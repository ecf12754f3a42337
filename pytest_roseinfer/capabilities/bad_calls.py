"""Bad calls: each must raise what its adapter says, and change nothing."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.cache_data import BadCall
from pytest_roseinfer.capabilities.capability import Capability, optional
from pytest_roseinfer.capabilities.observation import (
    AFTER_BAD_CALL,
    Finding,
    Observation,
    find_change,
    invariant,
)
from pytest_roseinfer.capabilities.preemption import preempted
from pytest_roseinfer.capabilities.swapping import Stage, swapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.oracle.oracle import Oracle
else:
    from pytest_roseinfer.capabilities.lazy import torch


class BadCallMethods:
    """The methods that are there to be misused."""

    standard_bad_calls: ClassVar[Sequence[str]] = ()
    """Names from the catalogue of bad calls: those that the cache must refuse."""
    bad_call_errors: ClassVar[tuple[type[BaseException], ...]] = (Exception,)
    """What it refuses them with."""

    @optional
    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Take a holder off each of these blocks, which are as in ``table``.

        This one and the three below are there to be misused, by ``standard_bad_calls``.
        """

    @optional
    def incref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Add a holder to each of these blocks."""

    @optional
    def gather_blocks(self, layer: int, blocks: list[int], length: int | None) -> object:
        """Read the first ``length`` tokens of these blocks, or all that they store."""

    @optional
    def append_to_blocks(
        self, layer: int, lists: list[list[int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append a token to each of some lists of blocks, which is ``append`` without names."""

    @optional
    def bad_calls(self) -> Iterable[BadCall]:
        """Make up calls that must be refused, or leave no trace, in the cache's present state."""


@invariant(rank=11, after=(AFTER_BAD_CALL,))
def bad_calls(seen: Observation) -> Finding | None:
    bad, error = seen.bad_call, seen.raised
    if bad is None:
        return None
    if error is not None and not isinstance(error, bad.errors):
        return Finding(f"{bad.words} raised {type(error).__name__}: {error}", cause=error)
    if error is None and bad.errors:
        names = " or ".join(kind.__name__ for kind in bad.errors)
        return Finding(f"{bad.words} went through; it must raise {names}")
    if seen.after.books() != seen.before.books():
        return Finding(f"{bad.words} changed the books")
    if change := find_change(seen, seen.before.arena, seen.after.arena):
        location, contents = change
        return Finding(f"{bad.words} changed what is stored in {contents.kind}", location)
    return None


# The catalogue of bad calls; an adapter names those that its cache must refuse.
#
# A bad call is made up for the state that a cache is in, and its words do not depend on that state.
# Where a list of blocks is wrong, its last block is: a cache that checks one after the other has
# done half of the work by then.


_NEVER, _NEVER_EITHER = (1 << 15) - 1, (1 << 15) - 2
"""Names that no history gives to a sequence."""

_Call = tuple[str, Callable[[], object]]
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
class StandardBadCall:
    needs: frozenset[str]
    """The methods that an adapter must define for it."""
    made_up: Callable[[Situation], Iterator[_Call]]
    """Yields nothing where the state has nothing to misuse in this way."""


STANDARD_BAD_CALLS: dict[str, StandardBadCall] = {}
"""The catalogue, by the names that adapters use."""


def standard_bad_calls(at: Situation) -> Iterator[BadCall]:
    """Make up those that the adapter names."""
    for name in at.adapter.standard_bad_calls:
        for words, call in STANDARD_BAD_CALLS[name].made_up(at):
            yield BadCall(words, call, at.adapter.bad_call_errors)


def _standard(
    *needs: str, name: str = ""
) -> Callable[[Callable[[Situation], Iterator[_Call]]], None]:
    def register(made_up: Callable[[Situation], Iterator[_Call]]) -> None:
        STANDARD_BAD_CALLS[name or made_up.__name__] = StandardBadCall(frozenset(needs), made_up)

    return register


# ---------------------------------------------------------------------------------- by name


@_standard("free")
def free_unknown(at: Situation) -> Iterator[_Call]:
    yield "free of a sequence that never was", partial(at.adapter.free, _NEVER)


@_standard("free")
def free_twice(at: Situation) -> Iterator[_Call]:
    for seq in at.freed()[-1:]:
        yield "free of a sequence that was freed", partial(at.adapter.free, seq)


@_standard("fork")
def fork_unknown(at: Situation) -> Iterator[_Call]:
    call = partial(at.adapter.fork, _NEVER, _NEVER_EITHER)
    yield "fork of a sequence that never was", call


@_standard("fork", "free")
def fork_freed(at: Situation) -> Iterator[_Call]:
    for seq in at.freed()[-1:]:
        yield "fork of a sequence that was freed", partial(at.adapter.fork, seq, _NEVER)


@_standard("fork")
def fork_to_a_live_name(at: Situation) -> Iterator[_Call]:
    live = at.live
    if len(live) > 1:
        yield "fork to the name of another sequence", partial(at.adapter.fork, live[0], live[-1])


@_standard("gather")
def gather_unknown(at: Situation) -> Iterator[_Call]:
    yield "gather of a sequence that never was", partial(at.adapter.gather, _NEVER, at.last)


@_standard("gather", "free")
def gather_freed(at: Situation) -> Iterator[_Call]:
    for seq in at.freed()[-1:]:
        yield "gather of a sequence that was freed", partial(at.adapter.gather, seq, at.last)


@_standard("gather", "swap_out", "swap_in")
def gather_swapped_out(at: Situation) -> Iterator[_Call]:
    for stage in (Stage.OUT, Stage.COMING):
        yield from _gather_absent(at, swapped(at.oracle).at(stage))


@_standard("gather", "preempt")
def gather_preempted(at: Situation) -> Iterator[_Call]:
    yield from _gather_absent(at, [*preempted(at.oracle)])


def _gather_absent(at: Situation, seqs: Sequence[int]) -> Iterator[_Call]:
    for seq in seqs[-1:]:
        call = partial(at.adapter.gather, seq, at.last)
        yield f"gather of a sequence that is {at.oracle.absent[seq].words}", call


@_standard("swap_out", "swap_in")
def append_to_swapped_out(at: Situation) -> Iterator[_Call]:
    new = at.tokens(1)
    for stage in (Stage.LEAVING, Stage.OUT, Stage.COMING):
        for seq in swapped(at.oracle).at(stage)[-1:]:
            call = partial(at.adapter.append, [seq], new, new)
            yield f"append to a sequence that is {stage.value}", call


@_standard("prefill")
def prefill_twice(at: Situation) -> Iterator[_Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.prefill, seq, at.tokens(1), at.tokens(1))
        yield "prefill of a sequence that has tokens", call


@_standard()
def append_twice(at: Situation) -> Iterator[_Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.append, [seq, seq], at.tokens(2), at.tokens(2))
        yield "append to one sequence twice", call


@_standard()
def append_of_another_shape(at: Situation) -> Iterator[_Call]:
    new = at.tokens(2)
    call = partial(at.adapter.append, [_NEVER, _NEVER_EITHER], new, new[:, :, :0])
    yield "append of values without heads", call


@_standard()
def append_one_row_short(at: Situation) -> Iterator[_Call]:
    new = at.tokens(2)
    call = partial(at.adapter.append, [_NEVER, _NEVER_EITHER], new, new[:, :1])
    yield "append of two keys and one value", call


@_standard()
def append_of_integers(at: Situation) -> Iterator[_Call]:
    new = at.tokens(2).int()
    yield "append of integers", partial(at.adapter.append, [_NEVER, _NEVER_EITHER], new, new)


# ----------------------------------------------------------------------------- by block


_Wrong = Iterator[tuple[int, int, str]]
"""A layer, a block that its tables must not name, and what that is."""


def _scratch(at: Situation) -> _Wrong:
    for block in sorted(at.adapter.scratch_blocks)[:1]:
        yield at.last, block, "the scratch block"


def _free_block(at: Situation) -> _Wrong:
    for block in list(at.adapter.ledger(at.last).free)[:1]:
        yield at.last, block, "a free block"


def _minus_1(_: Situation) -> _Wrong:
    yield 0, -1, "block -1"


def _other_pool(at: Situation) -> _Wrong:
    size = at.adapter.ledger(0).total + len(at.adapter.scratch_blocks)
    yield 0, size, "the first block behind the pool"
    yield 0, size + 1, "the second block behind the pool"
    if at.last:
        yield at.last, -1, "the block before the pool"


def _gather_blocks(at: Situation, layer: int, blocks: list[int]) -> object:
    return at.adapter.gather_blocks(layer, blocks, None)


def _append_to_blocks(at: Situation, layer: int, blocks: list[int]) -> object:
    new = at.tokens(2)
    return at.adapter.append_to_blocks(layer, [[], blocks], new, new)


_CALLS: dict[str, Callable[[Situation, int, list[int]], object]] = {
    "decref_blocks": lambda at, layer, blocks: at.adapter.decref_blocks(layer, blocks),
    "incref_blocks": lambda at, layer, blocks: at.adapter.incref_blocks(layer, blocks),
    "gather_blocks": _gather_blocks,
    "append_to_blocks": _append_to_blocks,
}


def _of_wrong_blocks(method: str, wrong: Callable[[Situation], _Wrong]) -> None:
    call = _CALLS[method]

    @_standard(method, "table", "ledger", name=f"{method}_of{wrong.__name__}")
    def made_up(at: Situation) -> Iterator[_Call]:
        for layer, block, words in wrong(at):
            for own in at.tables(layer)[:1]:
                # A table that is read is as long as it says; the wrong block takes the last place.
                before = own[:-1] if method in ("gather_blocks", "append_to_blocks") else own
                said = f"{method} of {words}, last in the list,"
                yield said, partial(call, at, layer, [*before, block])


for _method in _CALLS:
    for _wrong in (_scratch, _free_block, _minus_1, _other_pool):
        _of_wrong_blocks(_method, _wrong)


@_standard("decref_blocks", "table", "ledger")
def decref_blocks_too_often(at: Situation) -> Iterator[_Call]:
    for own in at.tables(at.last)[:1]:
        times = at.adapter.ledger(at.last).refcounts[own[0]] + 1
        call = partial(at.adapter.decref_blocks, at.last, [own[0]] * times)
        yield "decref_blocks of a block once more than it is held", call


@_standard("gather_blocks", "table")
def gather_blocks_past_the_end(at: Situation) -> Iterator[_Call]:
    # Behind the end of a sequence that was cut, its last block may hold tokens of another.
    whole = (seq for seq in reversed(at.live) if not at.oracle.unseen[seq])
    for seq in islice(filter(at.oracle.length, whole), 1):
        table = [block for block in at.adapter.table(seq, at.last) if block is not None]
        gather = partial(at.adapter.gather_blocks, at.last, table)
        more = at.oracle.length(seq) + 1
        yield "gather_blocks of one token more than is stored", partial(gather, more)
        yield "gather_blocks of -1 tokens", partial(gather, -1)


@_standard("append_to_blocks", "table", "ledger")
def append_to_blocks_twice(at: Situation) -> Iterator[_Call]:
    """A fork whose blocks did not get a second holder: the partial one would be written twice."""
    new = at.tokens(2)
    for own in at.tables(at.last)[:1]:
        partly = at.newest_length() % at.spec.block_size
        if partly and at.adapter.ledger(at.last).refcounts[own[-1]] == 1:
            lists = [own, list(own)]
            call = partial(at.adapter.append_to_blocks, at.last, lists, new, new)
            yield "append_to_blocks to a copied list and to what it was copied from", call


def refuse_unknown_bad_calls(adapter: type[Any]) -> None:
    name, named = adapter.__name__, getattr(adapter, "standard_bad_calls", ())
    if unknown := [repr(each) for each in named if each not in STANDARD_BAD_CALLS]:
        known = ", ".join(map(repr, STANDARD_BAD_CALLS))
        raise TypeError(
            f"{name}.standard_bad_calls names {', '.join(unknown)}: choose from {known}"
        )
    for each in named:
        needs = STANDARD_BAD_CALLS[each].needs
        if missing := sorted(need for need in needs if need not in adapter.abilities):
            raise TypeError(
                f"{name}.standard_bad_calls names {each!r}, which needs {', '.join(missing)}"
            )


BAD_CALLS = Capability(
    methods=BadCallMethods,
    invariants=(bad_calls,),
    refuse=(refuse_unknown_bad_calls,),
)
