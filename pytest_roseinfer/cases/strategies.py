"""Hypothesis strategies for caches, what is written to them, and whole histories.

Each is useful alone. Sizes are drawn where bugs live: lengths at a block's last position,
its first and one further; blocks shared by two and three; pools so small that they run
out. Payloads are never drawn, they are coded (see ``payload``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import CacheSpec
from pytest_roseinfer.cases.history import History
from pytest_roseinfer.cases.operations.append import Append
from pytest_roseinfer.cases.operations.fill import Fill
from pytest_roseinfer.cases.operations.fork import Fork
from pytest_roseinfer.cases.operations.operation import MOST_SEQUENCES, OPERATIONS
from pytest_roseinfer.cases.operations.prefill import Prefill
from pytest_roseinfer.cases.payload import LAYOUTS, VIEWS, lay_out
from pytest_roseinfer.oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.cases.operations.operation import Operation

_T = TypeVar("_T")
HEAD_DIMS = (4, 1, 5, 8, 80, 96)
BLOCK_SIZES = (4, 1, 2, 3, 5, 8, 16, 128)
_HEADS = (1, 2, 3) * 3 + (40,)
"""More than a kernel's tile may hold at once, now and then."""
_POOLS = (8, 2, 5, 12, 16, 24)
"""Blocks of a layer: soon all taken, or just enough for a batch of sequences."""
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
    device = settings.current().device
    here = [path for path in adapter.paths.values() if path.runs_on(device)]
    paths = here if aim is None else [adapter.paths[aim]]
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
    """Draws one history, keeping an oracle beside it so that every step makes sense.

    It is what operations are drawn with: see ``operations.operation.Writer``.
    """

    draw: st.DrawFn
    adapter: type[KVCacheAdapter]
    oracle: Oracle
    steps: list[Operation] = field(default_factory=list)
    names: int = 0
    """How many were used by now."""
    vacant: list[int] = field(default_factory=list)
    """Those of them that no sequence has, in the order in which they were given up."""

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
        """Sequences whose tokens are all written: the others are left alone until they are."""
        unwritten = {seq for due in self.oracle.reserved for seq, _ in due.rows}
        return [seq for seq in self.oracle.sequences if seq not in unwritten]

    @property
    def crowded(self) -> bool:
        return len(self.oracle.sequences) >= MOST_SEQUENCES

    @property
    def tight(self) -> bool:
        return self._free < 2

    @property
    def _free(self) -> int:
        return self.oracle.capacity - self.oracle.pages_used()

    @property
    def has_switches(self) -> bool:
        return bool(self.adapter.option_choices)

    def pick(self, choices: Sequence[_T]) -> _T:
        return self.draw(st.sampled_from(choices))

    def between(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def batch(self, fresh: Sequence[int]) -> tuple[int, ...]:
        return self.draw(append_batches(self.live, fresh))

    def count(self, seq: int) -> int:
        size, stored = self.oracle.block_size, self.oracle.length(seq)
        return self.draw(boundary_lengths(size, stored=stored, free=self._free))

    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        seqs = self.batch(self.fresh(1))
        return seqs, tuple(self.count(seq) for seq in seqs)

    def layout(self) -> str:
        return self.pick(LAYOUTS)

    def switches(self) -> dict[str, Any]:
        return self.draw(switches(self.adapter))

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
        for _ in range(self.between(1, 2)):
            self.take(Fork.of_any(self))

    def start(self, length: int) -> None:
        """A new sequence, of its full length if the cache takes prompts."""
        (seq,) = self.fresh(1)
        if "prefill" in self.adapter.abilities:
            self.take(Prefill(seq, length, self.layout()))
            return
        for _ in range(min(length, 5)):
            self.take(Append((seq,), self.layout()))

    def moves(self) -> list[Callable[[], Operation]]:
        """What may be done next, the simplest first; twice listed is twice as likely."""
        kinds = [kind for kind in OPERATIONS.values() if kind.needs <= self.adapter.abilities]
        moves = [move for kind in kinds for move in kind.moves(self)]
        moves.sort(key=lambda move: move.rank)
        return [move.draw for move in moves for _ in range(move.times)]

    def take(self, step: Operation) -> None:
        bounded = "ledger" in self.adapter.abilities
        if not step.apply(self.oracle) and not bounded:
            return  # it may hold more than the oracle knows
        named = step.changed()
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
    if "fork" in adapter.abilities:
        tails = ("anyhow", "partial", "full", "begun", "mixed", "mixed")
        writer.begin(draw(st.sampled_from(tails)))
    for _ in range(most_steps):
        # None comes first, so that shrinking ends a history early.
        moves = writer.moves() * 2
        move = draw(st.sampled_from([None, *moves] if writer.steps else moves))
        if move is None:
            break
        writer.take(move())
    while oracle.reserved:
        writer.take(Fill())
    return History(spec, tuple(writer.steps), finite=draw(st.booleans()))
