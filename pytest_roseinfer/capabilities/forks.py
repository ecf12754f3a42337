"""Forks of sequences, and copies that must equal them."""

from __future__ import annotations

from functools import partial
from itertools import product, starmap
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, Large, RankPolicy, optional
from pytest_roseinfer.capabilities.misuse import (
    OTHER_UNKNOWN_SEQ,
    UNKNOWN_SEQ,
    Call,
    MisuseState,
    misuse,
)
from pytest_roseinfer.oracle.oracle import FORK_SHARES
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator


class ForkMethods:
    """Adapter method for forks."""

    fork_shares: ClassVar[str] = "blocks"
    """Blocks that a fork shares: all ``"blocks"``, with copy-on-write of a partial one; only
    ``"full blocks"``, where a partial one is copied at once; or ``"nothing"``."""

    @optional
    def fork(self, parent: int, child: int) -> None:
        """Begin the new sequence ``child`` with all tokens of ``parent``."""


@operation.register("Copy")
class Copy(operation.Write):
    """Write the tokens of a sequence again under a new name: a fork that shares nothing.

    It is never drawn: a history with forks must end like the same history with copies.
    """

    parent: int
    child: int
    count: int
    layout: str = "plain"

    in_parts = True

    def rows(self) -> operation.Rows:
        return [(self.child, self.count)]

    def describe(self) -> str:
        tokens = format_count(self.count, "token")
        return f"write the {tokens} of sequence {self.parent} again as {self.child}"

    def fill_in_numbers(self, oracle: operation.Oracle) -> operation.Operation:
        return Copy(self.parent, self.child, oracle.length(self.parent), self.layout)

    def tokens(self, oracle: operation.Oracle) -> operation.Tokens:
        return oracle.tokens(self.parent)

    def text_slices(self, oracle: operation.Oracle) -> list[operation.TextSlice]:
        return oracle.stored_text(self.parent)

    def change(self, oracle: operation.Oracle) -> None:
        oracle.append(self.rows(), self.tokens(oracle))
        oracle.branch_text(self.parent, self.child)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        if "prefill" in cache.adapter.abilities:
            cache.adapter.prefill(self.child, cache.key, cache.value)
            return
        for at in range(self.count):
            token = slice(at, at + 1)
            for pass_part in cache.pass_parts:
                pass_part(token)
            cache.adapter.append([self.child], cache.key[:, token], cache.value[:, token])


@operation.register("Fork")
class Fork(operation.Operation):
    """Begin a sequence with all tokens of another one."""

    parent: int
    child: int

    needs = frozenset({"fork"})
    needs_tokens = True

    def describe(self) -> str:
        return f"fork sequence {self.parent} as sequence {self.child}"

    def new_seqs(self) -> list[int]:
        return [self.child]

    def uses(self) -> list[int]:
        return [self.parent]

    def changed_seqs(self) -> list[int]:
        return [self.child]

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.fork_fits(self.parent)

    def change(self, oracle: operation.Oracle) -> None:
        oracle.fork(self.parent, self.child)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.fork(self.parent, self.child)

    def copies_blocks(self, oracle: operation.Oracle) -> bool:
        return oracle.fork_shares != "blocks"

    def without_sharing(self, oracle: operation.Oracle) -> operation.Operation:
        if oracle.mixes_epochs(self.parent):  # a copy would write its older tokens anew
            return self
        return Copy(self.parent, self.child, oracle.length(self.parent))

    @classmethod
    def draw_for_any(cls, writer: operation.Writer) -> Fork:
        return cls(writer.pick(writer.filled), *writer.fresh(1))

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if writer.filled and len(writer.oracle.sequences) < operation.MAX_SEQUENCES:
            yield operation.DrawOption(70, 4, lambda: cls.draw_for_any(writer))


def refuse_fork_shares(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for an unknown choice of ``fork_shares``."""
    if adapter.fork_shares not in FORK_SHARES:
        allowed = ", ".join(map(repr, FORK_SHARES))
        raise TypeError(
            f"{adapter.__name__}.fork_shares is {adapter.fork_shares!r}: choose one of {allowed}"
        )


# Bad calls


@misuse("fork")
def fork_unknown(at: MisuseState) -> Iterator[Call]:
    call = partial(at.adapter.fork, UNKNOWN_SEQ, OTHER_UNKNOWN_SEQ)
    yield "fork of a sequence that never was", call


@misuse("fork", "free")
def fork_freed(at: MisuseState) -> Iterator[Call]:
    for seq in at.freed()[-1:]:
        yield "fork of a sequence that was freed", partial(at.adapter.fork, seq, UNKNOWN_SEQ)


@misuse("fork")
def fork_to_a_live_name(at: MisuseState) -> Iterator[Call]:
    live = at.live
    if len(live) > 1:
        yield "fork to the name of another sequence", partial(at.adapter.fork, live[0], live[-1])


_LARGE = (2, 20, 40, 0)
"""Sequences of a large history that are forked; with blocks of 4 tokens, 20 and 40 end in a partial
one."""


def _large(at: Large) -> Iterator[operation.Operation]:
    """Fork some of the rows, and move each parent and its child to the end of the batch."""
    for parent in _LARGE:
        if parent in at.names and len(at.names) < at.max_names:
            child = at.fresh()
            yield Fork(parent, child)
            at.names = [*(seq for seq in at.names if seq != parent), parent, child]


FORKS = Capability(
    methods=ForkMethods,
    walk=lambda at: starmap(Fork, product(at.filled, at.names)),
    large=_large,
    misuse=(fork_unknown, fork_freed, fork_to_a_live_name),
    sharded={"fork": RankPolicy.SAME},
    operations=(
        Copy,
        Fork,
    ),
    refuse=(refuse_fork_shares,),
)
