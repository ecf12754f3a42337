"""Bad calls: each must raise an error that its adapter declares, and change nothing."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.capability import Capability, optional
from pytest_roseinfer.capabilities.misuse import Call, Misuse, MisuseState, catalogue, misuse
from pytest_roseinfer.capabilities.observation import (
    AFTER_BAD_CALL,
    Finding,
    Observation,
    find_change,
    invariant,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import BadCall


class BadCallMethods:
    """Adapter methods and attributes for bad calls."""

    standard_bad_calls: ClassVar[Sequence[str]] = ()
    """Names of the standard bad calls that the cache must refuse."""
    bad_call_errors: ClassVar[tuple[type[BaseException], ...]] = (Exception,)
    """Errors that the cache may raise for a standard bad call."""

    @optional
    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Decrement the refcount of each of these blocks, numbered as in ``table``.

        This method and the next three are called by ``standard_bad_calls`` alone.
        """

    @optional
    def incref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Increment the refcount of each of these blocks."""

    @optional
    def gather_blocks(self, layer: int, blocks: list[int], length: int | None) -> object:
        """Read the first ``length`` tokens of these blocks; all stored ones for None."""

    @optional
    def append_to_blocks(
        self, layer: int, lists: list[list[int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append one token to each list of blocks, as ``append`` does for sequences."""

    @optional
    def bad_calls(self) -> Iterable[BadCall]:
        """Return calls that the cache must refuse in its current state, or that leave no trace."""


@invariant(rank=11, after=(AFTER_BAD_CALL,))
def bad_calls(observation: Observation) -> Finding | None:
    """A bad call must raise one of its errors, and change nothing."""
    bad, error = observation.bad_call, observation.raised
    if bad is None:
        return None
    if error is not None and not isinstance(error, bad.errors):
        problem = f"{bad.description} raised {type(error).__name__}: {error}"
        return Finding(problem, cause=error, kind=f"raised {type(error).__name__}")
    if error is None and bad.errors:
        names = " or ".join(kind.__name__ for kind in bad.errors)
        problem = f"{bad.description} went through; it must raise {names}"
        return Finding(problem, kind="went through")
    if observation.after.tables_and_ledgers() != observation.before.tables_and_ledgers():
        return Finding(f"{bad.description} changed the books", kind="books")
    if change := find_change(observation, observation.before.arena, observation.after.arena):
        location, contents = change
        problem = f"{bad.description} changed what is stored in {contents.kind}"
        return Finding(problem, location, kind="storage")
    return None


# Calls with blocks that the cache must not touch


_Wrong = Iterator[tuple[int, int, str]]
"""A layer, a block that its tables must not name, and the block in words."""


def _scratch(at: MisuseState) -> _Wrong:
    for block in sorted(at.adapter.scratch_blocks)[:1]:
        yield at.last, block, "the scratch block"


def _free_block(at: MisuseState) -> _Wrong:
    for block in list(at.adapter.ledger(at.last).free)[:1]:
        yield at.last, block, "a free block"


def _minus_1(_: MisuseState) -> _Wrong:
    yield 0, -1, "block -1"


def _other_pool(at: MisuseState) -> _Wrong:
    size = at.adapter.ledger(0).total + len(at.adapter.scratch_blocks)
    yield 0, size, "the first block after the pool"
    yield 0, size + 1, "the second block after the pool"
    if at.last:
        yield at.last, -1, "the block before the pool"


def _gather_blocks(at: MisuseState, layer: int, blocks: list[int]) -> object:
    return at.adapter.gather_blocks(layer, blocks, None)


def _append_to_blocks(at: MisuseState, layer: int, blocks: list[int]) -> object:
    new = at.tokens(2)
    return at.adapter.append_to_blocks(layer, [[], blocks], new, new)


_CALLS: dict[str, Callable[[MisuseState, int, list[int]], object]] = {
    "decref_blocks": lambda at, layer, blocks: at.adapter.decref_blocks(layer, blocks),
    "incref_blocks": lambda at, layer, blocks: at.adapter.incref_blocks(layer, blocks),
    "gather_blocks": _gather_blocks,
    "append_to_blocks": _append_to_blocks,
}


def _of_wrong_blocks(method: str, wrong: Callable[[MisuseState], _Wrong]) -> Misuse:
    call = _CALLS[method]

    @misuse(method, "table", "ledger", name=f"{method}_of{wrong.__name__}")
    def made_up(at: MisuseState) -> Iterator[Call]:
        for layer, block, description in wrong(at):
            for table in at.tables(layer)[:1]:
                # A read or append must get a table of the right length: replace its last block.
                replaces_last = method in ("gather_blocks", "append_to_blocks")
                blocks = [*(table[:-1] if replaces_last else table), block]
                described = f"{method} of {description}, last in the list,"
                yield described, partial(call, at, layer, blocks)

    return made_up


_OF_WRONG_BLOCKS = [
    _of_wrong_blocks(method, wrong)
    for method in _CALLS
    for wrong in (_scratch, _free_block, _minus_1, _other_pool)
]


@misuse("decref_blocks", "table", "ledger")
def decref_blocks_too_often(at: MisuseState) -> Iterator[Call]:
    for table in at.tables(at.last)[:1]:
        times = at.adapter.ledger(at.last).refcounts[table[0]] + 1
        call = partial(at.adapter.decref_blocks, at.last, [table[0]] * times)
        yield "decref_blocks of a block once more than it is held", call


@misuse("gather_blocks", "table")
def gather_blocks_past_the_end(at: MisuseState) -> Iterator[Call]:
    # A truncated sequence is left out: its last block may hold another one's tokens past its end.
    whole = (seq for seq in reversed(at.live) if not at.oracle.truncated_on_last[seq])
    for seq in islice(filter(at.oracle.length, whole), 1):
        table = [block for block in at.adapter.table(seq, at.last) if block is not None]
        gather = partial(at.adapter.gather_blocks, at.last, table)
        more = at.oracle.length(seq) + 1
        yield "gather_blocks of one token more than is stored", partial(gather, more)
        yield "gather_blocks of -1 tokens", partial(gather, -1)


@misuse("append_to_blocks", "table", "ledger")
def append_to_blocks_twice(at: MisuseState) -> Iterator[Call]:
    """Append to two equal lists whose blocks have refcount 1: the partial one is written twice.

    This is a fork that failed to increment refcounts.
    """
    new = at.tokens(2)
    for table in at.tables(at.last)[:1]:
        is_partial = at.newest_length() % at.spec.block_size
        if is_partial and at.adapter.ledger(at.last).refcounts[table[-1]] == 1:
            lists = [table, list(table)]
            call = partial(at.adapter.append_to_blocks, at.last, lists, new, new)
            yield "append_to_blocks to a copied list and to what it was copied from", call


def refuse_unknown_bad_calls(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for standard bad calls that are unknown or lack a method."""
    name, bad_call_names = adapter.__name__, getattr(adapter, "standard_bad_calls", ())
    known_misuse = catalogue(adapter)
    if unknown := [repr(each) for each in bad_call_names if each not in known_misuse]:
        known_names = ", ".join(map(repr, known_misuse))
        raise TypeError(
            f"{name}.standard_bad_calls names {', '.join(unknown)}: choose from {known_names}"
        )
    for each in bad_call_names:
        needs = known_misuse[each].needs
        if missing := sorted(need for need in needs if need not in adapter.abilities):
            raise TypeError(
                f"{name}.standard_bad_calls names {each!r}, which needs {', '.join(missing)}"
            )


BAD_CALLS = Capability(
    methods=BadCallMethods,
    misuse=(
        *_OF_WRONG_BLOCKS,
        decref_blocks_too_often,
        gather_blocks_past_the_end,
        append_to_blocks_twice,
    ),
    invariants=(bad_calls,),
    refuse=(refuse_unknown_bad_calls,),
)
