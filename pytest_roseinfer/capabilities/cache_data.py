"""The data by which a cache is described and shows itself: shape, books, fast paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pytest_roseinfer.capabilities import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class CacheFull(Exception):
    """Raise this (or list your own in ``full_errors``) when a cache has no room left."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of a cache to build."""

    num_layers: int = 1
    num_heads: int = 1
    head_dim: int = 4
    block_size: int = 4
    num_blocks: int = 8
    """Blocks that sequences may use, in each layer; in all, where layers share a pool."""
    dtype: str = "float32"
    """The name of a torch dtype, or one from the adapter's ``tolerance``."""
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Switches of the cache under test, drawn from the adapter's ``option_choices``."""
    windows: Sequence[int | None] = ()
    """The window of every layer, None where it attends to all; empty where no layer has one."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who holds what in one layer, as the cache's own books say."""

    refcounts: Mapping[int, int]
    """The number of holders of every block that is not free."""
    free: Sequence[int]
    """Blocks nobody holds."""
    total: int
    """The number of blocks that sequences may use."""
    cached: Collection[int] = ()
    """Those of ``free`` whose content is kept, since a text may find it again."""
    swapped: int | None = None
    """How many blocks of swap space are taken; None where that is not shown."""
    num_free: int | None = None
    """How many blocks are free as the cache counts them, apart from ``free``; None where it does
    not count."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that a cache must refuse, or that must leave no trace."""

    words: str
    """The call in words, as in "free_blocks with a block of another layer"."""
    call: Callable[[], object]
    errors: tuple[type[BaseException], ...] = ()
    """The errors of which it must raise one; none for a call that is fine and undoes itself."""


# A fast path of a cache or an engine, as its adapter declares it.


@dataclass(frozen=True, slots=True)
class FastPath:
    """A fast path: what it must equal, and when it can and cannot run.

    A setting is given as in ``{"fused": True, "min_batch": 1}``, with switches of
    ``option_choices``. It applies if every switch it names has that value.
    """

    equals: str
    """The slow path whose results it must reproduce, by its name in ``path_counts``."""
    runs_with: Sequence[Mapping[str, Any]] = ()
    """Settings under each of which it can run, so that histories can aim at it. None are needed
    where the first choice of every switch will do."""
    never_with: Sequence[Mapping[str, Any]] = ()
    """Settings any one of which keeps it from running; if it is counted under one, it fails."""
    device: str | None = None
    """The only kind of device it can run on, such as ``"cuda"``; None where any will do."""
    share: float = 1.0
    """How many examples aim at it for each that aims at another path; less where they take long."""
    one_position: bool = False
    """It can only write when all rows go to the same position of a block."""

    def __post_init__(self) -> None:
        if not isinstance(self.equals, str):
            raise TypeError(f"equals={self.equals!r}: expected the name of a slow path")
        for name in ("runs_with", "never_with"):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                raise TypeError(f"{name}={given!r}: expected several settings, as in [{given!r}]")

        if not self.share > 0:
            raise TypeError(f"share={self.share!r}: expected a number above 0")

    def runs_on(self, device: str) -> bool:
        return self.device in (None, device.partition(":")[0])

    def can_run(self, options: Mapping[str, Any], device: str) -> bool:
        """Return True if neither the device nor these switches keep it from running."""

        def applies(setting: Mapping[str, Any]) -> bool:
            return setting.items() <= options.items()

        allowed = not self.runs_with or any(map(applies, self.runs_with))
        return allowed and self.runs_on(device) and not any(map(applies, self.never_with))


# What a quantised cache promises: how far it may be off, and from what.


OVER = ("token", "block")
MOST = 0.25
"""With more than that, one token could be read for another."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far what a cache reads back may be from what was written."""

    of_greatest: float
    """As a part of the greatest value, in size, that shares the scale: 1/254 for a scale that maps
    this value to 127, with a little for rounding the scale; 1/16 for ``float8_e4m3fn``."""
    over: str = "token"
    """What is searched for the greatest value: all heads of a ``"token"``, or all that stood in its
    ``"block"`` since that was taken. Keys, values and layers are apart in either case."""
    tensors: str = "float32"
    """The dtype of what the cache is handed and what it returns."""


def is_dtype(value: object) -> bool:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return isinstance(found, torch.dtype) and found.is_floating_point


# The few shapes that are drawn where kernels are compiled, since each new one costs seconds.
#
# Which shapes meet is searched for on a CPU, where Triton's kernels are interpreted and a shape
# costs nothing; a GPU shows what compilers and hardware make of each size.


_T = TypeVar("_T")
Shape = tuple[tuple[int, ...], str]
"""What kernels are compiled for: heads, the sizes of a head and of a block; and a dtype."""


class Bounds(NamedTuple):
    """The most elements that a token and a block may have."""

    of_a_token: int
    of_a_block: int

    def allow(self, num_heads: int, head_dim: int, block_size: int) -> bool:
        of_a_token = num_heads * head_dim
        return of_a_token <= self.of_a_token and of_a_token * block_size <= self.of_a_block


@cache
def few_shapes(
    head_counts: tuple[int, ...],
    head_dims: tuple[int, ...],
    block_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    bounds: Bounds,
) -> tuple[Shape, ...]:
    """Choose shapes, small and large by turns, so that all that is listed occurs in one."""
    listed = head_counts, head_dims, block_sizes
    allowed = [sizes for sizes in product(*listed) if bounds.allow(*sizes)]
    allowed.sort(key=prod)
    missing = {entry for sizes in allowed for entry in enumerate(sizes)}
    chosen: list[tuple[int, ...]] = []
    while missing:
        news = [len(missing & {*enumerate(sizes)}) for sizes in allowed]
        best = [sizes for sizes, new in zip(allowed, news, strict=True) if new == max(news)]
        chosen.append(best[-(len(chosen) % 2)])
        missing -= {*enumerate(chosen[-1])}
    return tuple(zip(chosen, cycle(dtypes), strict=False))


def few_of(choices: Sequence[_T], spec: CacheSpec) -> Sequence[_T]:
    """Keep the first choice and one that depends on the shape."""
    others = choices[1:]
    at = spec.num_heads + spec.head_dim + 2 * spec.block_size
    return [choices[0], others[at % len(others)]] if others else choices


class ReuseCondition(NamedTuple):
    """A condition that the harness counts by the answers of one method."""

    method: str
    description: str


USED_AGAIN: Mapping[str, ReuseCondition] = {
    "handle_used_again": ReuseCondition(
        "reserve",
        "``reserve`` returns an object or a number that it returned before, and that was filled "
        "since. Needs ``reserve``.",
    ),
    "slot_used_again": ReuseCondition(
        "container",
        "A sequence begins in the slot that ``container`` showed of another one, which has left "
        "it. Needs ``container``.",
    ),
    "list_used_again": ReuseCondition(
        "container",
        "A sequence begins in the list object that ``container`` showed of another one, which has "
        "left it. Needs ``container``.",
    ),
    "block_used_while_absent": ReuseCondition(
        "table",
        "A sequence gets a block that another one gave up, which was preempted or swapped out and "
        "is not back; counted for each such block of the first layer. Needs ``table``.",
    ),
}
"""The harness counts each of them, where an adapter names it and defines the method."""


def refuse_what_is_not_shown(adapter: type[Any]) -> None:
    """Raise ``TypeError`` where a condition could never be met, since nothing shows it."""
    for name, each in USED_AGAIN.items():
        if name in adapter.conditions and each.method not in adapter.abilities:
            raise TypeError(
                f"{adapter.__name__}.conditions names {name!r}: define {each.method}(), which "
                "shows it"
            )


OWN_CONDITIONS: Mapping[str, str] = {
    "last_position": "A row begins at the last position of its block, which holds other tokens "
    "already; counted for each such row.",
    "out_of_room_mid_batch": "A write of several rows is refused, and its first row alone would "
    "have found room. Only a cache with a ``ledger`` is run out of room.",
    "name_used_again": "A sequence begins, by a write or a fork, under the name of one that was "
    "freed; counted for each such sequence.",
}
"""The harness counts each of them where an adapter names it."""
FINDS_PREFIXES = frozenset(
    ("use_tokens", "match_prefix", "prefill", "table", "ledger", "prefixes.shares=equal prefixes")
)
"""What shows that a sequence began with what was found of its text."""
