"""Hypothesis strategies for caches and histories, and others that users import from here.

Sizes are drawn at the boundaries where bugs are likely: lengths around the first and the last
position of a block; blocks with two or three holders; pools so small that they run out. Payloads
are never drawn but encoded (see ``payload``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import Bounds, CacheSpec, choose_shapes, few_of
from pytest_roseinfer.capabilities.payload import LAYOUTS, VIEWS, lay_out
from pytest_roseinfer.capabilities.windows import with_windows
from pytest_roseinfer.histories.history import GATHERS_EVERY, History
from pytest_roseinfer.histories.keyed_texts import text_keys
from pytest_roseinfer.histories.preludes import (
    PrefixCandidates,
    append_in_batches,
    end_absences,
)
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.texts import WHOLE, duplicate_in_namespaces, repeat_with_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch

# Inputs of paged-cache kernels


def strided_views(tensor: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """Draw a memory layout for the same ``[layers, tokens, heads, head_dim]`` values."""
    return st.sampled_from(VIEWS).map(lambda layout: lay_out(tensor, layout))


@st.composite
def block_tables(draw: st.DrawFn, *, num_blocks: int, max_rows: int = 6) -> list[list[int]]:
    """Draw tables over a pool whose rows share at most a prefix of blocks with each other."""
    order = draw(st.permutations(list(range(num_blocks))))
    tables: list[list[int]] = []
    at = 0
    for _ in range(draw(st.integers(1, max_rows))):
        shared: list[int] = []
        sharing: bool = draw(st.booleans())
        if tables and sharing:
            parent = tables[draw(st.integers(0, len(tables) - 1))]
            shared = parent[: draw(st.integers(0, len(parent)))]
        num_own = draw(st.integers(0, num_blocks - at))
        tables.append(shared + list(order[at : at + num_own]))
        at += num_own
    return tables


# Lengths near the boundaries of blocks


_MAX_TOKENS = 300


def boundary_lengths(
    block_size: int, *, stored: int = 0, free: int | None = None, windows: Sequence[int] = ()
) -> st.SearchStrategy[int]:
    """Draw a number of tokens to append so that the end falls at, before or after a boundary.

    With ``free``, the end of the last free block is one more boundary; with ``windows``, so are the
    lengths that move one more block and two more blocks out of each window.
    """
    room = -stored % block_size
    ends = {0, room, room + block_size, room + (free or 0) * block_size}
    for window in windows:
        num_left_out = max(0, stored - window + 1) // block_size
        ends |= {(num_left_out + more) * block_size + window - 1 - stored for more in (1, 2)}
    near = {1, 2} | {end + more for end in ends for more in (-1, 0, 1)}
    max_count = max(_MAX_TOKENS, block_size + 1)
    return st.sampled_from(sorted(count for count in near if 0 < count <= max_count))


def boundary_cuts(block_size: int, stored: int) -> st.SearchStrategy[int]:
    """Draw a length to truncate ``stored`` tokens to: near a boundary, or 0 or all."""
    last = stored - stored % block_size
    ends = {0, block_size, last - block_size, last, stored}
    near = {end + more for end in ends for more in (-1, 0, 1)}
    return st.sampled_from(sorted((each for each in near if 0 <= each <= stored), reverse=True))


# Texts


_MAX_TEXTS = 4
_MAX_KEYED_TEXTS = 2
"""Most texts before each is repeated with up to five keys."""


@st.composite
def text_branches(
    draw: st.DrawFn, *, block_size: int, max_texts: int = _MAX_TEXTS, apart: bool = False
) -> tuple[Branch, ...]:
    """Draw texts with shared prefixes that end at or near a block boundary or inside a block.

    Some texts are equal. With ``apart``, the second one shares nothing with the first.
    """
    edges = {block_size, 2 * block_size}
    inside = block_size + block_size // 2
    lengths = sorted({WHOLE, 0, 1, inside, *(edge + more for edge in edges for more in (-1, 0, 1))})
    branches: list[Branch] = [(0, 0)] * (1 + apart)
    for text in range(len(branches), draw(st.integers(len(branches), max_texts))):
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
_MAX_TOKEN_ELEMENTS = 3200
"""Elements of all heads of a token: more than a kernel's tile may hold at once."""
_MAX_BLOCK_ELEMENTS = 4 * _MAX_TOKEN_ELEMENTS
_POOLS = (8, 2, 5, 12, 16, 24)
"""Blocks per layer: soon all in use, or just enough for a batch of sequences."""
_POOLS_OF_TEXTS = (3, 2, 4, 5, 8)
"""Blocks per layer of caches with texts: few, so that cached blocks are soon evicted."""
_POOLS_OF_BATCHES = (24, 32, 20)
"""Blocks per layer for batches of several sequences, two of them long."""
_SEQUENCES_WITH_LOOKAHEAD = 3
"""Sequences for whose look-ahead blocks most caches have room beyond the blocks drawn."""
_BLOCKS_OF_BATCHES = (2, 3, 4, 5, 8)
"""Block sizes that sequences fill after a few tokens."""


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
    """Draw specs of small caches of awkward shapes: odd head sizes, and few tiny blocks."""
    choices = tuple(head_counts), tuple(head_dims), tuple(block_sizes)
    bounds = _bounds(*choices)
    if device == _INTERPRETED_ON:
        sizes = draw(_sizes(*choices, bounds))
    else:
        sizes, dtype = draw(st.sampled_from(choose_shapes(*choices, tuple(dtypes), bounds)))
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
    """Return bounds on sizes that still allow each listed value in some combination.

    The whole storage is compared after every step, so large blocks are slow.
    """
    fewest, smallest = min(head_counts), min(head_dims)
    return Bounds(
        max(_MAX_TOKEN_ELEMENTS, fewest * max(head_dims), max(head_counts) * smallest),
        max(_MAX_BLOCK_ELEMENTS, fewest * smallest * max(block_sizes)),
    )


@st.composite
def _sizes(
    draw: st.DrawFn,
    head_counts: Sequence[int],
    head_dims: Sequence[int],
    block_sizes: Sequence[int],
    bounds: Bounds,
) -> tuple[int, ...]:
    """Draw one size of each kind, large ones less often and never all together."""
    num_heads = draw(st.sampled_from(_mostly_small(head_counts, _FEW_HEADS)))
    dims = _up_to(bounds.token_elements // num_heads, head_dims)
    if num_heads > _FEW_HEADS:  # mostly the largest allowed size, so that a tile is too small
        dims = [max(dims)] * len(dims) + dims
    else:
        dims = _mostly_small(dims, _SMALL_HEAD)
    head_dim = draw(st.sampled_from(dims))
    longest = max(min(block_sizes), bounds.block_elements // (num_heads * head_dim))
    return num_heads, head_dim, draw(st.sampled_from(_up_to(longest, block_sizes)))


def _mostly_small(sizes: Sequence[int], max_size: int) -> list[int]:
    """List sizes up to ``max_size`` three times, and then the larger ones."""
    return _up_to(max_size, sizes) * 3 + [size for size in sizes if size > max_size]


def _up_to(max_size: int, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size <= max_size]


def switches(
    adapter: type[KVCacheAdapter | EngineAdapter], aim: str | None = None, first_setting: int = 0
) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a value for every switch: those that a path needs, with up to three other changes.

    The path is ``aim``, or any declared one if None; the simplest settings of ``aim`` are those
    with the index ``first_setting``. Independent draws would rarely reach a path that needs certain
    values of several switches.
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
    needed = [list(path.settings_to_draw) or [{}] for path in paths] or [[{}]]
    if aim is not None:
        first_setting %= len(needed[0])
        needed[0] = needed[0][first_setting:] + needed[0][:first_setting]
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
    """Drawing of one history, with an oracle that keeps every step valid.

    Operations use it as ``capabilities.operation.Writer``, which documents its methods.
    """

    draw: st.DrawFn
    adapter: type[KVCacheAdapter]
    oracle: Oracle
    layouts: Sequence[str]
    steps: list[Operation] = field(default_factory=list)
    names: int = 0
    """Next new name, which is the number of names used so far."""
    no_more_steps: bool = False
    """True if the history has its last step."""
    vacant: list[int] = field(default_factory=list)
    """Names of former sequences, in the order of their end."""
    prefix_candidates: PrefixCandidates | None = None
    """Texts stored so far; None if the cache does not reuse prefixes."""
    allowed_kinds: Sequence[type[Operation]] = ()
    """Kinds of steps to draw if one of them is possible; empty for all kinds."""
    kinds: Sequence[type[Operation]] = field(init=False)
    """Kinds of steps whose methods the adapter defines."""

    def __post_init__(self) -> None:
        every = chain.from_iterable(each.operations for each in self.adapter.capabilities)
        self.kinds = [kind for kind in every if kind.needs <= self.adapter.abilities]

    @property
    def live(self) -> list[int]:
        return self.oracle.usable

    @property
    def filled(self) -> list[int]:
        return [seq for seq in self.live if self.oracle.length(seq)]

    @property
    def reuses_prefixes(self) -> bool:
        return self.prefix_candidates is not None and "prefill" in self.adapter.abilities

    def pick(self, choices: Sequence[_T]) -> _T:
        return self.draw(st.sampled_from(choices))

    def between(self, min_value: int, max_value: int) -> int:
        return self.draw(st.integers(min_value, max_value))

    def shuffle(self, choices: Sequence[_T]) -> Sequence[_T]:
        return self.draw(st.permutations(choices))

    def fresh(self, count: int) -> tuple[int, ...]:
        """Draw new names and vacant ones, most often the latest vacant one."""
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

    def name_reusing_prefix(self) -> int:
        if not self.prefix_candidates:
            return self.fresh(1)[0]
        names = self.prefix_candidates.names(self.names, self.vacant)
        return self.pick(names) if names and self.between(0, 2) else self.fresh(1)[0]

    def name_with_prefix(self, tokens: int, text: int | None = None) -> int:
        assert self.prefix_candidates
        names = self.prefix_candidates.names_with_prefix(self.names, self.vacant, tokens, text)
        return self.pick(names)

    def name_without_prefix(self, tokens: int) -> int | None:
        assert self.prefix_candidates
        names = self.prefix_candidates.names_without_prefix(self.names, self.vacant, tokens)
        return self.pick(names) if names else None

    def batch(self, fresh: Sequence[int]) -> tuple[int, ...]:
        return self.draw(append_batches(self.live, fresh))

    def count(self, seq: int) -> int:
        oracle, stored = self.oracle, self.oracle.length(seq)
        free, size = oracle.pages_free(), oracle.block_size
        windows = oracle.windows.sizes
        again = self.prefix_candidates.lengths(seq) if self.prefix_candidates and not stored else []
        if again and (how := self.between(0, 2)):
            # A cache may reuse stored blocks, and so have more room: try just too many tokens.
            beyond = free * size + 1
            fitting = [length for length in again if oracle.fits([(seq, length)])]
            return self.pick([*again, beyond, beyond] if how == 1 else fitting or again)
        return self.draw(boundary_lengths(size, stored=stored, free=free, windows=windows))

    def length(self, seq: int) -> int:
        if (lengths := self.oracle.lengths_to_try(seq)) and self.between(0, 2):
            return self.pick(lengths)
        return self.draw(boundary_cuts(self.oracle.block_size, self.oracle.length(seq)))

    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        seqs = self.batch(self.fresh(1))
        return seqs, tuple(map(self.count, seqs))

    def layout(self) -> str:
        return self.pick(self.layouts)

    def switches(self) -> dict[str, Any]:
        return self.draw(switches(self.adapter))

    def draw_options(self) -> list[Callable[[], Operation]]:
        """List the ways to draw the next step, the simplest first, each as often as its weight."""
        options = [each for kind in self.allowed_kinds for each in kind.draw_options(self)]
        options = options or [each for kind in self.kinds for each in kind.draw_options(self)]
        options.sort(key=lambda each: each.rank)
        return [each.draw for each in options for _ in range(each.times)]

    def take(self, step: Operation) -> None:
        """Add a step; one that does not fit is dropped if the cache has no ledger."""
        if step.allowed(self.oracle) and not step.fits(self.oracle):
            if "ledger" not in self.adapter.abilities:
                return
            # A cache that shares by prefix may have room after all; its contents are unknown then.
            shares = self.adapter.prefixes.shares == "equal prefixes"
            self.no_more_steps = shares and not self.oracle.exceeds_capacity(step.rows())
        step.apply(self.oracle)
        if self.prefix_candidates:
            self.prefix_candidates.note()
        names = [*step.changed_seqs(), *self.oracle.pending_seqs]
        self.names = max([self.names, *(seq + 1 for seq in names)])
        used = dict.fromkeys([*self.vacant, *names])
        names_in_use = {*self.oracle.named, *self.oracle.pending_seqs}
        self.vacant = [name for name in used if name not in names_in_use]
        self.steps.append(step)


@st.composite
def histories(
    draw: st.DrawFn,
    adapter: type[KVCacheAdapter],
    *,
    max_steps: int = 12,
    device: str = "cpu",
    aim: str | None = None,
    first_setting: int = 0,
    preludes: Sequence[History] = (),
    few_kinds: bool = False,
    in_batches: bool = False,
) -> History:
    """Draw a cache spec and steps, of operations that ``adapter`` offers.

    The cache starts with the switches that the path ``aim`` needs, the simplest history with those
    of the index ``first_setting``. With ``preludes``, two in three histories begin with all steps
    of one of them, or all but the last. With ``few_kinds``, only one to three kinds of steps are
    drawn, so that effects of many equal steps are met more often. With ``in_batches``, each history
    begins with the batches of ``append_in_batches``.
    """
    begins = st.one_of(st.none(), *[st.sampled_from(preludes)] * 2) if preludes else st.none()
    prelude = draw(begins)
    has_texts = "use_tokens" in adapter.abilities
    if prelude:
        spec, texts = prelude.spec, prelude.texts
    else:
        spec = _draw_spec(draw, adapter, device, aim, first_setting, in_batches=in_batches)
        apart = "load_prefix" in adapter.abilities  # to evict one text for another
        most = _MAX_KEYED_TEXTS if adapter.key_parts else _MAX_TEXTS
        branches = text_branches(block_size=spec.block_size, max_texts=most, apart=apart)
        texts = draw(branches) if has_texts else ()
        if "use_namespaces" in adapter.abilities:
            texts = duplicate_in_namespaces(texts)
        elif adapter.key_parts:
            keys = draw(text_keys(adapter.key_parts, block_size=spec.block_size))
            texts = repeat_with_keys(texts, keys)
    oracle = Oracle.of(adapter, spec, texts)
    layouts = LAYOUTS if device == _INTERPRETED_ON else few_of(LAYOUTS, spec)
    writer = _Writer(draw, adapter, oracle, layouts)
    looks_up = "look_up" in adapter.abilities
    if has_texts and (looks_up or adapter.prefixes.shares == "equal prefixes"):
        in_parts = adapter.prefixes.granularity == "token"
        writer.prefix_candidates = PrefixCandidates(
            oracle, least=1 if in_parts else spec.block_size
        )
    if prelude:
        _repeat(writer, prelude)
    elif in_batches:
        append_in_batches(writer)
    else:
        _begin(writer)
    if few_kinds:
        kinds = st.lists(st.sampled_from(writer.kinds), min_size=1, max_size=3, unique=True)
        writer.allowed_kinds = draw(kinds)
    for _ in range(max_steps - len(writer.steps) * in_batches):
        # None comes first, so that shrinking ends a history early.
        options = writer.draw_options() * 2
        draw_step = (
            None
            if writer.no_more_steps
            else draw(st.sampled_from([None, *options][not writer.steps :]))
        )
        if draw_step is None:
            break
        writer.take(draw_step())
    _finish(writer)
    every = draw(st.sampled_from(GATHERS_EVERY)) if "gather" in adapter.abilities else 1
    finite = draw(st.booleans())
    return History(spec, tuple(writer.steps), finite, texts, gathers_every=every)


@st.composite
def layer_windows(
    draw: st.DrawFn,
    num_layers: int,
    *,
    block_size: int,
    groups: int,
    sizes: Sequence[int | None] = (),
) -> tuple[int | None, ...]:
    """Draw a window for each layer, at most ``groups`` different ones; None counts as one.

    They are among ``sizes`` if there are any, else around the edges of blocks. One in four has full
    attention and a window of two blocks, which forks soon share differently.
    """
    edges = (block_size, 2 * block_size, 3 * block_size)
    near = sorted({1, 2} | {edge + more for edge in edges for more in (-1, 0, 1)} - {0})
    kinds = st.sampled_from(sizes) if sizes else st.one_of(st.sampled_from(near), st.none())
    most = min(groups, num_layers)
    any_windows = st.lists(kinds, min_size=1, max_size=most, unique=True)
    if most > 1 and not sizes:
        any_windows = st.one_of(*[any_windows] * 3, st.just([None, 2 * block_size]))
    drawn = draw(any_windows)
    others = (draw(st.sampled_from(drawn)) for _ in range(num_layers - len(drawn)))
    return (*drawn, *others)


def _draw_spec(
    draw: st.DrawFn,
    adapter: type[KVCacheAdapter],
    device: str,
    aim: str | None,
    first_setting: int,
    *,
    in_batches: bool,
) -> CacheSpec:
    """Draw a spec that the adapter supports, with windows if it has any."""
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
            options=switches(adapter, aim, first_setting),
            device=device,
            pools=pools,
        )
    )
    if more := adapter.lookahead_blocks * _SEQUENCES_WITH_LOOKAHEAD:
        spec = replace(spec, num_blocks=spec.num_blocks + draw(st.sampled_from((more, 0))))
    if groups := adapter.windows.groups:
        layers = max(spec.num_layers, min(2, groups))
        sizes = adapter.windows.sizes
        windows = draw(
            layer_windows(layers, block_size=spec.block_size, groups=groups, sizes=sizes)
        )
        spec = with_windows(spec, adapter, windows)
    return spec


def _begin(writer: _Writer) -> None:
    """Begin with the preludes of the adapter's capabilities."""
    every = (each for one in writer.adapter.capabilities for each in one.preludes)
    enabled = (each for each in every if writer.adapter.abilities.intersection(each.any_of))
    for prelude in sorted(enabled, key=lambda each: each.rank):
        prelude.open(writer)


def _repeat(writer: _Writer, prelude: History) -> None:
    """Begin with the steps of another history, or with all but the last."""
    steps = prelude.operations
    for step in steps[: len(steps) - writer.pick((0, 0, 1))]:
        writer.take(step)


def _finish(writer: _Writer) -> None:
    """Fill reservations, begin looked-up sequences, and end some absences."""
    able = writer.adapter.abilities
    for capability in writer.adapter.capabilities:
        offered = any(kind.needs <= able for kind in capability.operations)
        for step in (
            capability.finishing_steps(writer.oracle)
            if capability.finishing_steps and offered
            else ()
        ):
            writer.take(step)
    if writer.oracle.absent:
        end_absences(writer)
