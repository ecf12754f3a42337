"""Hypothesis strategies for caches, what is written to them, and whole histories.

Each is useful alone. Sizes are drawn where bugs live: lengths at a block's last position,
its first and one further; blocks shared by two and three; pools so small that they run
out. Payloads are never drawn, they are coded (see ``payload``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter, abilities
from pytest_roseinfer.cases.history import (
    Append,
    AppendMany,
    AppendPadded,
    Fill,
    Fork,
    Free,
    History,
    Operation,
    Prefill,
    Reserve,
    SetOptions,
    apply_to_oracle,
    changed_by,
    fits_oracle,
)
from pytest_roseinfer.cases.layouts import LAYOUTS, VIEWS, lay_out
from pytest_roseinfer.oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pytest_roseinfer.adapters.engine import EngineAdapter

HEAD_DIMS = (4, 1, 5, 8, 80, 96)
BLOCK_SIZES = (4, 1, 2, 3, 5, 8, 16, 128)
_HEADS = (1, 2, 3) * 3 + (40,)
"""More than a kernel's tile may hold at once, now and then."""
_POOLS = (8, 2, 5, 12, 16, 24)
"""Blocks of a layer: soon all taken, or just enough for a batch of sequences."""
_MOST_SEQUENCES = 6
_MOST_TOKENS = 300


@st.composite
def cache_specs(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = ("float32", "float16", "bfloat16"),
    options: st.SearchStrategy[dict[str, Any]] | None = None,
    device: str = "cpu",
) -> CacheSpec:
    """Small caches of awkward shapes: odd head sizes, tiny blocks, few of them."""
    num_heads = draw(st.sampled_from(_HEADS))
    wide = num_heads > max(_HEADS[:3])
    block_size = draw(st.sampled_from(BLOCK_SIZES[:4] if wide else BLOCK_SIZES))
    return CacheSpec(
        num_layers=draw(st.sampled_from((1, 2, 1, 4, 2, 3))),
        num_heads=num_heads,
        head_dim=80 if wide else draw(st.sampled_from(HEAD_DIMS)),
        block_size=block_size,
        num_blocks=draw(st.sampled_from(_POOLS if block_size < 8 else _POOLS[:4])),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        device=device,
        options=draw(options) if options is not None else {},
    )


def switches(
    adapter: type[KVCacheAdapter | EngineAdapter], aim: str | None = None
) -> st.SearchStrategy[dict[str, Any]]:
    """A value for every switch: what a path needs, and up to three changes.

    The path is ``aim``, or any of those declared. Aiming gives each its share of histories;
    tossing a coin for every switch would starve those that need several switches right.
    """
    choices = adapter.option_choices
    usual = {name: values[0] for name, values in choices.items()}
    others = [(name, value) for name, values in choices.items() for value in values[1:]]
    if not others:
        return st.just(usual)
    here = adapter.paths_on(settings.current().device)
    paths = list(here.values()) if aim is None else [adapter.paths[aim]]
    switches = [path.runs_with or [{}] for path in paths] or [[{}]]
    aims = st.sampled_from(switches).flatmap(st.sampled_from)
    changes = st.lists(st.sampled_from(others), max_size=3)
    return st.tuples(changes, aims).map(lambda drawn: {**usual, **dict(drawn[0]), **drawn[1]})


def boundary_lengths(
    block_size: int, *, stored: int = 0, free: int | None = None
) -> st.SearchStrategy[int]:
    """How many tokens to append so that the end falls at, before or after a boundary.

    With the number of ``free`` blocks, the end of the last of them is one more boundary.
    """
    room = -stored % block_size
    ends = {0, room, room + block_size}
    if free is not None:
        ends.add(room + free * block_size)
    near = {1, 2} | {end + more for end in ends for more in (-1, 0, 1)}
    return st.sampled_from(sorted(count for count in near if 0 < count <= _MOST_TOKENS))


def append_batches(
    live: Sequence[int], fresh: Sequence[int] = ()
) -> st.SearchStrategy[tuple[int, ...]]:
    """Sequences to append to: all in order, all shuffled, or any subset in any order."""
    names = (*live, *fresh)
    subsets = st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True)
    return st.one_of(
        st.just(names), st.permutations(names).map(tuple), subsets.map(tuple), subsets.map(tuple)
    )


def strided_views(tensor: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """The same ``[layers, tokens, heads, head_dim]`` values, in one memory layout or another."""
    return st.sampled_from(VIEWS).map(lambda layout: lay_out(tensor, layout))


@st.composite
def block_tables(draw: st.DrawFn, *, num_blocks: int, most_rows: int = 6) -> list[list[int]]:
    """Tables over a pool: no block in two rows unless it is a prefix that both share."""
    order = draw(st.permutations(list(range(num_blocks))))
    tables: list[list[int]] = []
    at = 0
    for _ in range(draw(st.integers(1, most_rows))):
        shared: list[int] = []
        sharing: bool = draw(st.booleans())
        if tables and sharing:
            parent = tables[draw(st.integers(0, len(tables) - 1))]
            shared = parent[: draw(st.integers(0, len(parent)))]
        own = draw(st.integers(0, num_blocks - at))
        tables.append(shared + list(order[at : at + own]))
        at += own
    return tables


@dataclass(slots=True)
class _Writer:
    """Draws one history, keeping an oracle beside it so that every step makes sense."""

    draw: st.DrawFn
    adapter: type[KVCacheAdapter]
    oracle: Oracle
    steps: list[Operation] = field(default_factory=list)
    names: int = 0
    """How many were used by now."""
    vacant: list[int] = field(default_factory=list)
    """Those of them that no sequence has, in the order in which they were given up."""
    waiting: list[set[int]] = field(default_factory=list)
    """Sequences of each reservation not yet filled: until then they are left alone."""

    def fresh(self, count: int) -> tuple[int, ...]:
        """Names that no sequence has: new ones, and vacant ones, most often the latest of these."""
        new, vacant = self.names, list(self.vacant)
        names = []
        for _ in range(count):
            name = self.draw(st.sampled_from([new, *vacant[-1:], *vacant])) if vacant else new
            names.append(name)
            new += name == new
            vacant = [each for each in vacant if each != name]
        return tuple(names)

    @property
    def live(self) -> list[int]:
        """Sequences that may be used now."""
        waiting = set().union(*self.waiting)
        return [seq for seq in self.oracle.sequences if seq not in waiting]

    @property
    def tight(self) -> bool:
        """Whether the next batch may find no room: freeing lets the history go on."""
        return self.oracle.capacity - self.oracle.pages_used() < 2

    def layout(self) -> str:
        return self.draw(st.sampled_from(LAYOUTS))

    def begin(self, tail: str) -> None:
        """Open with sequences of which some share blocks, or anyhow.

        Their last block is partial, full or begun, or one is each, so that a batch of all
        of them meets most conditions at once.
        """
        size = self.oracle.block_size
        lengths = {"partial": size - 1 or 1, "full": size, "begun": size + 1}
        if tail == "anyhow":
            return
        if tail == "mixed":
            for length in self.draw(st.permutations(sorted(lengths.values()))):
                self.start(length)
        else:
            self.start(lengths[tail])
        for _ in range(self.draw(st.integers(1, 2))):
            self.take(Fork(self.draw(st.sampled_from(self.live)), *self.fresh(1)))

    def start(self, length: int) -> None:
        """A new sequence, of its full length if the cache takes prompts."""
        (seq,) = self.fresh(1)
        if "prefill" in abilities(self.adapter):
            self.take(Prefill(seq, length, self.layout()))
            return
        for _ in range(min(length, 5)):
            self.take(Append((seq,), self.layout()))

    def append(self) -> Operation:
        crowded = len(self.live) >= _MOST_SEQUENCES
        most = (0 if crowded else 1) if self.live else 3
        fresh = self.fresh(self.draw(st.integers(0 if self.live else 1, most)))
        return Append(self.draw(append_batches(self.live, fresh)), self.layout())

    def append_every(self) -> Operation:
        return Append(tuple(self.live), self.layout())

    def append_many(self) -> Operation:
        seqs = self.draw(append_batches(self.live, self.fresh(1)))
        counts = tuple(self._count(seq) for seq in seqs)
        return AppendMany(seqs, counts, self.layout())

    def append_padded(self) -> Operation:
        seqs: list[int | None] = list(self.draw(append_batches(self.live, self.fresh(1))))
        for _ in range(self.draw(st.integers(1, 3))):
            seqs.insert(self.draw(st.integers(0, len(seqs))), None)
        return AppendPadded(tuple(seqs), self.layout())

    def reserve(self) -> Operation:
        seqs = self.draw(append_batches(self.live, self.fresh(1)))
        return Reserve(seqs, tuple(self._count(seq) for seq in seqs), self.layout())

    def prefill(self) -> Operation:
        (seq,) = self.fresh(1)
        return Prefill(seq, self._count(seq), self.layout())

    def fork(self) -> Operation:
        return Fork(self.draw(st.sampled_from(self.live)), *self.fresh(1))

    def free(self) -> Operation:
        return Free(self.draw(st.sampled_from(self.live)))

    def set_options(self) -> Operation:
        return SetOptions(self.draw(switches(self.adapter)))

    def _count(self, seq: int) -> int:
        stored = self.oracle.length(seq)
        free = self.oracle.capacity - self.oracle.pages_used()
        return self.draw(boundary_lengths(self.oracle.block_size, stored=stored, free=free))

    def moves(self) -> list[Callable[[], Operation]]:
        """What may be done next; twice listed is twice as likely."""
        can = abilities(self.adapter)
        crowded = len(self.oracle.sequences) >= _MOST_SEQUENCES
        moves = [self.append] * 3
        if "append_many" in can:
            moves.append(self.append_many)
        if "append_padded" in can:
            moves.append(self.append_padded)
        if {"reserve", "fill"} <= can:
            moves.append(self.reserve)
            moves += [Fill] * (2 * bool(self.waiting))
        if "prefill" in can and not crowded:
            moves += [self.prefill] * 2
        if self.live:
            moves += [self.append_every] * 3
            if "fork" in can and not crowded:
                moves += [self.fork] * 4
            if "free" in can:
                moves += [self.free] * (8 if self.tight else 2)
            if "set_options" in can and self.adapter.option_choices:
                moves += [self.set_options] * 2
        return moves

    def take(self, step: Operation) -> None:
        bounded = "ledger" in abilities(self.adapter)
        if not bounded and not fits_oracle(self.oracle, step):
            return
        fits = apply_to_oracle(self.oracle, step)
        if isinstance(step, Reserve) and fits:
            self.waiting.append(set(step.seqs))
        elif isinstance(step, Fill):
            self.waiting.pop(0)
        named = changed_by(step)
        self.names = max([self.names, *(seq + 1 for seq in named)])
        self.vacant = [
            name
            for name in dict.fromkeys([*self.vacant, *named])
            if name not in self.oracle.sequences
        ]
        self.steps.append(step)


@st.composite
def histories(
    draw: st.DrawFn,
    adapter: type[KVCacheAdapter],
    *,
    most_steps: int = 12,
    device: str = "cpu",
    aim: str | None = None,
) -> History:
    """A cache spec and steps that fit the abilities ``adapter`` offers.

    With ``aim``, the cache starts out with the switches that path needs.
    """
    options = switches(adapter, aim)
    spec = draw(cache_specs(dtypes=adapter.dtypes, options=options, device=device))
    oracle = Oracle(spec.block_size, spec.num_blocks, adapter.fork_shares)
    writer = _Writer(draw, adapter, oracle)
    if "fork" in abilities(adapter):
        tails = ("anyhow", "partial", "full", "begun", "mixed", "mixed")
        writer.begin(draw(st.sampled_from(tails)))
    for _ in range(most_steps):
        # None comes first, so that shrinking ends a history early.
        moves = writer.moves() * 2
        move = draw(st.sampled_from([None, *moves] if writer.steps else moves))
        if move is None:
            break
        writer.take(move())
    while writer.waiting:
        writer.take(Fill())
    return History(spec, tuple(writer.steps), finite=draw(st.booleans()))
