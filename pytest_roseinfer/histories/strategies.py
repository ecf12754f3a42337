"""Hypothesis strategies for caches and whole histories, and the others that users import from here.

Sizes are drawn where bugs live: lengths at a block's last position, its first and one further;
blocks shared by two and three; pools so small that they run out. Payloads are never drawn, they
are coded (see ``payload``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import Bounds, CacheSpec, few_of, few_shapes
from pytest_roseinfer.capabilities.payload import LAYOUTS, VIEWS, lay_out
from pytest_roseinfer.capabilities.windows import with_windows
from pytest_roseinfer.histories.history import GATHERS_EVERY, History
from pytest_roseinfer.histories.preludes import (
    SaidBefore,
    append_in_batches,
    end_absences,
)
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.texts import WHOLE, in_two_namespaces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch

# Draws what kernels of a paged cache are handed: tensors in any memory layout, and tables.


def strided_views(tensor: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """Draw a memory layout for the same ``[layers, tokens, heads, head_dim]`` values."""
    return st.sampled_from(VIEWS).map(lambda layout: lay_out(tensor, layout))


@st.composite
def block_tables(draw: st.DrawFn, *, num_blocks: int, most_rows: int = 6) -> list[list[int]]:
    """Draw tables over a pool: two rows have no block in common but in a shared prefix."""
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


# Draws how many tokens to append or to keep, near the boundaries of blocks.


_MOST_TOKENS = 300


def boundary_lengths(
    block_size: int, *, stored: int = 0, free: int | None = None, windows: Sequence[int] = ()
) -> st.SearchStrategy[int]:
    """Draw a number of tokens to append so that the end falls at, before or after a boundary.

    With the number of ``free`` blocks, the end of the last of them is one more boundary; with
    ``windows``, so is where one more block and where two more have left one.
    """
    room = -stored % block_size
    ends = {0, room, room + block_size, room + (free or 0) * block_size}
    for window in windows:
        left = max(0, stored - window + 1) // block_size
        ends |= {(left + more) * block_size + window - 1 - stored for more in (1, 2)}
    near = {1, 2} | {end + more for end in ends for more in (-1, 0, 1)}
    most = max(_MOST_TOKENS, block_size + 1)
    return st.sampled_from(sorted(count for count in near if 0 < count <= most))


def boundary_cuts(block_size: int, stored: int) -> st.SearchStrategy[int]:
    """Draw a length to cut ``stored`` tokens to: at, before or after a boundary, or the ends."""
    last = stored - stored % block_size
    ends = {0, block_size, last - block_size, last, stored}
    near = {end + more for end in ends for more in (-1, 0, 1)}
    return st.sampled_from(sorted((each for each in near if 0 <= each <= stored), reverse=True))


# Draws texts that begin alike.


@st.composite
def text_branches(draw: st.DrawFn, *, block_size: int, most: int = 4) -> tuple[Branch, ...]:
    """Draw texts that begin alike, up to a block's edge, around it or inside, or are equal."""
    edges = {block_size, 2 * block_size}
    inside = block_size + block_size // 2
    lengths = sorted({WHOLE, 0, 1, inside, *(edge + more for edge in edges for more in (-1, 0, 1))})
    branches: list[Branch] = [(0, 0)]
    for text in range(1, draw(st.integers(1, most))):
        length: int = draw(st.sampled_from([WHOLE, WHOLE, *lengths]))
        branches.append((draw(st.integers(0, text - 1)), length))
    return tuple(branches)


__all__ = [
    "append_batches",
    "block_tables",
    "boundary_cuts",
    "boundary_lengths",
    "cache_specs",
    "histories",
    "strided_views",
    "switches",
    "text_branches",
]

_T = TypeVar("_T")
_INTERPRETED_ON = "cpu"
_FEW_HEADS = 8
_SMALL_HEAD = 16
_MOST_OF_A_TOKEN = 3200
"""Elements of all heads: more than a kernel's tile may hold at once."""
_MOST_OF_A_BLOCK = 4 * _MOST_OF_A_TOKEN
_POOLS = (8, 2, 5, 12, 16, 24)
"""Blocks of a layer: soon all taken, or just enough for a batch of sequences."""
_POOLS_OF_TEXTS = (3, 2, 4, 5, 8)
"""Blocks that are kept for later texts are soon needed for others."""
_POOLS_OF_BATCHES = (24, 32, 20)
"""Blocks for batches of several sequences, two of them long ones."""
_BLOCKS_OF_BATCHES = (2, 3, 4, 5, 8)
"""Tokens of a block that sequences soon begin and soon fill."""


@st.composite
def cache_specs(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = KVCacheAdapter.dtypes,
    head_counts: Sequence[int] = KVCacheAdapter.head_counts,
    head_dims: Sequence[int] = KVCacheAdapter.head_dims,
    block_sizes: Sequence[int] = KVCacheAdapter.block_sizes,
    options: st.SearchStrategy[dict[str, Any]] | None = None,
    device: str = "cpu",
    pools: Sequence[int] = _POOLS,
) -> CacheSpec:
    """Draw small caches of awkward shapes: odd head sizes, tiny blocks, few of them."""
    listed = tuple(head_counts), tuple(head_dims), tuple(block_sizes)
    bounds = _bounds(*listed)
    if device == _INTERPRETED_ON:
        sizes = draw(_sizes(*listed, bounds))
    else:
        sizes, dtype = draw(st.sampled_from(few_shapes(*listed, tuple(dtypes), bounds)))
        dtypes, pools = [dtype], pools[:2]
    num_heads, head_dim, block_size = sizes
    return CacheSpec(
        num_layers=draw(st.sampled_from((1, 2, 1, 4, 2, 3))),
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=draw(st.sampled_from(pools if block_size < 8 else pools[:4])),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        device=device,
        options=draw(options) if options is not None else {},
    )


def _bounds(
    head_counts: Sequence[int], head_dims: Sequence[int], block_sizes: Sequence[int]
) -> Bounds:
    """Bound the size of what is drawn, so that all that is listed can be drawn still.

    All that is stored is compared after every step, so that large blocks are slow.
    """
    fewest, smallest = min(head_counts), min(head_dims)
    return Bounds(
        max(_MOST_OF_A_TOKEN, fewest * max(head_dims), max(head_counts) * smallest),
        max(_MOST_OF_A_BLOCK, fewest * smallest * max(block_sizes)),
    )


@st.composite
def _sizes(
    draw: st.DrawFn,
    head_counts: Sequence[int],
    head_dims: Sequence[int],
    block_sizes: Sequence[int],
    bounds: Bounds,
) -> tuple[int, ...]:
    """Draw one of each. All that are listed are drawn, but large ones less, and not together."""
    num_heads = draw(st.sampled_from(_mostly_small(head_counts, _FEW_HEADS)))
    dims = _up_to(bounds.of_a_token // num_heads, head_dims)
    if num_heads > _FEW_HEADS:  # most often as large as they may be, so that a tile is too small
        dims = [max(dims)] * len(dims) + dims
    else:
        dims = _mostly_small(dims, _SMALL_HEAD)
    head_dim = draw(st.sampled_from(dims))
    longest = max(min(block_sizes), bounds.of_a_block // (num_heads * head_dim))
    return num_heads, head_dim, draw(st.sampled_from(_up_to(longest, block_sizes)))


def _mostly_small(sizes: Sequence[int], most: int) -> list[int]:
    """List sizes up to ``most`` three times, ahead of the larger ones."""
    return _up_to(most, sizes) * 3 + [size for size in sizes if size > most]


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size <= most]


def switches(
    adapter: type[KVCacheAdapter | EngineAdapter], aim: str | None = None
) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a value for every switch: what a path needs, and up to three changes.

    The path is ``aim``, or any that is declared. Coin tosses for every switch would starve the
    paths that need several switches right.
    """
    choices = adapter.option_choices
    usual = {name: values[0] for name, values in choices.items()}
    others = [(name, value) for name, values in choices.items() for value in values[1:]]
    if not others:
        return st.just(usual)
    if aim is None:
        device = settings.current().device
        paths = [path for path in adapter.paths.values() if path.runs_on(device)]
    else:
        paths = [adapter.paths[aim]]
    needed = [path.runs_with or [{}] for path in paths] or [[{}]]
    aims = st.sampled_from(needed).flatmap(st.sampled_from)
    changes = st.lists(st.sampled_from(others), max_size=3)
    return st.tuples(changes, aims).map(lambda drawn: {**usual, **dict(drawn[0]), **drawn[1]})


def append_batches(
    live: Sequence[int], fresh: Sequence[int] = ()
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw sequences to append to: all in order, all shuffled, or any subset in any order."""
    names = (*live, *fresh)
    subsets = st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True)
    return st.one_of(
        st.just(names), st.permutations(names).map(tuple), subsets.map(tuple), subsets.map(tuple)
    )


@dataclass(slots=True)
class _Writer:
    """Draws one history, with an oracle beside it so that every step makes sense.

    Operations see it as ``operations.operation.Writer``, which documents what they may ask for.
    """

    draw: st.DrawFn
    adapter: type[KVCacheAdapter]
    oracle: Oracle
    layouts: Sequence[str]
    steps: list[Operation] = field(default_factory=list)
    names: int = 0
    """The number of names used so far; the next new one."""
    over: bool = False
    """No step may follow."""
    vacant: list[int] = field(default_factory=list)
    """The names that no sequence has any more, in the order in which they were given up."""
    said: SaidBefore | None = None
    """What sequences have said so far, if the cache may find it again."""
    few: Sequence[type[Operation]] = ()
    """The kinds of steps to draw, where one of them is possible; empty for all."""

    @property
    def live(self) -> list[int]:
        return self.oracle.usable

    @property
    def filled(self) -> list[int]:
        return [seq for seq in self.live if self.oracle.length(seq)]

    @property
    def finds_prompts(self) -> bool:
        return self.said is not None and "prefill" in self.adapter.abilities

    def pick(self, choices: Sequence[_T]) -> _T:
        return self.draw(st.sampled_from(choices))

    def between(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def shuffled(self, choices: Sequence[_T]) -> Sequence[_T]:
        return self.draw(st.permutations(choices))

    def fresh(self, count: int) -> tuple[int, ...]:
        """Draw new names and vacant ones, most often the latest of the vacant."""
        new, vacant = self.names, list(self.vacant)
        names = []
        for _ in range(count):
            name = self.pick([new, *vacant[-1:], *vacant]) if vacant else new
            names.append(name)
            if name == new:
                new += 1
            else:
                vacant.remove(name)
        return tuple(names)

    def beginner(self) -> int:
        if not self.said:
            return self.fresh(1)[0]
        named = self.said.names(self.names, self.vacant)
        return self.pick(named) if named and self.between(0, 2) else self.fresh(1)[0]

    def repeater(self, tokens: int) -> int:
        assert self.said
        return self.pick(self.said.repeating(self.names, self.vacant, tokens))

    def parting(self, tokens: int) -> int | None:
        assert self.said
        names = self.said.parting(self.names, self.vacant, tokens)
        return self.pick(names) if names else None

    def batch(self, fresh: Sequence[int]) -> tuple[int, ...]:
        return self.draw(append_batches(self.live, fresh))

    def count(self, seq: int) -> int:
        oracle, stored = self.oracle, self.oracle.length(seq)
        free, size = oracle.pages_free(), oracle.block_size
        windows = oracle.windows.sizes
        again = self.said.lengths(seq) if self.said and not stored else []
        if again and (how := self.between(0, 2)):
            # A cache may count as room what it finds, so some just find none.
            beyond = free * size + 1
            fitting = [length for length in again if oracle.fits([(seq, length)])]
            return self.pick([*again, beyond, beyond] if how == 1 else fitting or again)
        return self.draw(boundary_lengths(size, stored=stored, free=free, windows=windows))

    def length(self, seq: int) -> int:
        return self.draw(boundary_cuts(self.oracle.block_size, self.oracle.length(seq)))

    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        seqs = self.batch(self.fresh(1))
        return seqs, tuple(map(self.count, seqs))

    def layout(self) -> str:
        return self.pick(self.layouts)

    def switches(self) -> dict[str, Any]:
        return self.draw(switches(self.adapter))

    def kinds(self) -> list[type[Operation]]:
        """List the kinds of steps that the cache offers."""
        every = (each.operations for each in self.adapter.capabilities)
        return [kind for kind in chain(*every) if kind.needs <= self.adapter.abilities]

    def moves(self) -> list[Callable[[], Operation]]:
        """List the ways to draw the next step, the simplest first; some are listed often."""
        moves = [move for kind in self.few for move in kind.moves(self)]
        moves = moves or [move for kind in self.kinds() for move in kind.moves(self)]
        moves.sort(key=lambda move: move.rank)
        return [move.draw for move in moves for _ in range(move.times)]

    def take(self, step: Operation) -> None:
        """Add a step; one that finds no room is kept only if the cache shows how much it has."""
        if step.allowed(self.oracle) and not step.fits(self.oracle):
            if "ledger" not in self.adapter.abilities:
                return
            # A cache that shares more than forks may find room, and nobody knows what it holds.
            self.over = self.adapter.prefixes.shares == "equal prefixes"
        step.apply(self.oracle)
        if self.said:
            self.said.note()
        named = [*step.changed(), *self.oracle.promised]
        self.names = max([self.names, *(seq + 1 for seq in named)])
        used = dict.fromkeys([*self.vacant, *named])
        taken = {*self.oracle.named, *self.oracle.promised}
        self.vacant = [name for name in used if name not in taken]
        self.steps.append(step)


@st.composite
def histories(
    draw: st.DrawFn,
    adapter: type[KVCacheAdapter],
    *,
    most_steps: int = 12,
    device: str = "cpu",
    aim: str | None = None,
    preludes: Sequence[History] = (),
    few_kinds: bool = False,
    in_batches: bool = False,
) -> History:
    """Draw a cache spec and steps that fit the abilities ``adapter`` offers.

    The cache starts out with the switches that the path ``aim`` needs. Given ``preludes``, two in
    three begin with all steps of one of them, or with all but the last. With ``few_kinds``, one to
    three kinds of steps are drawn alone, so that what takes many in a row is met more often. With
    ``in_batches``, each begins with batches that a write of several rows is hard to test without.
    """
    begins = st.one_of(st.none(), *[st.sampled_from(preludes)] * 2) if preludes else st.none()
    prelude = draw(begins)
    told = "use_tokens" in adapter.abilities
    if prelude:
        spec, texts = prelude.spec, prelude.texts
    else:
        spec = _draw_spec(draw, adapter, device, aim, in_batches=in_batches)
        texts = draw(text_branches(block_size=spec.block_size)) if told else ()
        if "use_namespaces" in adapter.abilities:
            texts = in_two_namespaces(texts)
    oracle = Oracle.of(adapter, spec, texts)
    layouts = LAYOUTS if device == _INTERPRETED_ON else few_of(LAYOUTS, spec)
    writer = _Writer(draw, adapter, oracle, layouts)
    if told and adapter.prefixes.shares == "equal prefixes":
        in_parts = adapter.prefixes.granularity == "token"
        writer.said = SaidBefore(oracle, least=1 if in_parts else spec.block_size)
    if prelude:
        _repeat(writer, prelude)
    elif in_batches:
        append_in_batches(writer)
    else:
        _begin(writer)
    if few_kinds:
        some = st.lists(st.sampled_from(writer.kinds()), min_size=1, max_size=3, unique=True)
        writer.few = draw(some)
    for _ in range(most_steps - len(writer.steps) * in_batches):
        # None comes first, so that shrinking ends a history early.
        moves = writer.moves() * 2
        move = None if writer.over else draw(st.sampled_from([None, *moves][not writer.steps :]))
        if move is None:
            break
        writer.take(move())
    _finish(writer)
    every = draw(st.sampled_from(GATHERS_EVERY)) if "gather" in adapter.abilities else 1
    finite = draw(st.booleans())
    return History(spec, tuple(writer.steps), finite, texts, gathers_every=every)


@st.composite
def layer_windows(
    draw: st.DrawFn, num_layers: int, *, block_size: int, groups: int
) -> tuple[int | None, ...]:
    """Draw up to so many different windows, no window being one of them, and one for each layer."""
    edges = (block_size, 2 * block_size, 3 * block_size)
    sizes = sorted({1, 2} | {edge + more for edge in edges for more in (-1, 0, 1)} - {0})
    kinds = st.one_of(st.sampled_from(sizes), st.none())
    drawn = draw(st.lists(kinds, min_size=1, max_size=min(groups, num_layers), unique=True))
    others = (draw(st.sampled_from(drawn)) for _ in range(num_layers - len(drawn)))
    return (*drawn, *others)


def _draw_spec(
    draw: st.DrawFn,
    adapter: type[KVCacheAdapter],
    device: str,
    aim: str | None,
    *,
    in_batches: bool,
) -> CacheSpec:
    """Draw a cache that the adapter can be built as, with windows where it has any."""
    pools: Sequence[int] = _POOLS_OF_TEXTS if "use_tokens" in adapter.abilities else _POOLS
    block_sizes = adapter.block_sizes
    if in_batches:
        pools = _POOLS_OF_BATCHES
        if device == _INTERPRETED_ON:  # elsewhere each size is compiled
            block_sizes = [s for s in block_sizes if s in _BLOCKS_OF_BATCHES] or block_sizes
    spec = draw(
        cache_specs(
            dtypes=adapter.dtypes,
            head_counts=adapter.head_counts,
            head_dims=adapter.head_dims,
            block_sizes=block_sizes,
            options=switches(adapter, aim),
            device=device,
            pools=pools,
        )
    )
    if groups := adapter.windows.groups:
        layers = max(spec.num_layers, min(2, groups))
        windows = draw(layer_windows(layers, block_size=spec.block_size, groups=groups))
        spec = with_windows(spec, adapter, windows)
    return spec


def _begin(writer: _Writer) -> None:
    """Open with what the abilities of the cache are hard to test without."""
    every = (each for one in writer.adapter.capabilities for each in one.preludes)
    due = (each for each in every if writer.adapter.abilities.intersection(each.any_of))
    for prelude in sorted(due, key=lambda each: each.rank):
        prelude.open(writer)


def _repeat(writer: _Writer, prelude: History) -> None:
    """Open with the steps of another history, or with all but the last."""
    steps = prelude.operations
    for step in steps[: len(steps) - writer.pick((0, 0, 1))]:
        writer.take(step)


def _finish(writer: _Writer) -> None:
    """Write what room was reserved for, begin what was looked up, and end what is half done."""
    able = writer.adapter.abilities
    for capability in writer.adapter.capabilities:
        offered = any(kind.needs <= able for kind in capability.operations)
        for step in capability.endings(writer.oracle) if capability.endings and offered else ():
            writer.take(step)
    if writer.oracle.absent:
        end_absences(writer)
