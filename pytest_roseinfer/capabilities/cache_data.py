"""Data that describes a cache: its shape, ledger, fast paths, tolerance and conditions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, product
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from pytest_roseinfer.capabilities import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class CacheFull(Exception):
    """Error to raise when a cache has no room left, unless ``full_errors`` lists another one."""


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
    """Refcounts and free blocks of one layer, as the cache itself records them."""

    refcounts: Mapping[int, int]
    """Number of holders of each block that is not free."""
    free: Sequence[int]
    """Blocks without a holder."""
    total: int
    """Number of blocks that sequences may use."""
    cached: Collection[int] = ()
    """Blocks of ``free`` whose content is kept for later lookups."""
    swapped: int | None = None
    """Blocks of swap space in use; None if not shown."""
    num_free: int | None = None
    """The cache's own count of free blocks, kept apart from ``free``; None if it has no count."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Event: lookups find these full blocks, which follow each other, from now on."""

    block_hashes: Sequence[Hashable]
    """Hash of each block, which no other prefix has."""
    parent_block_hash: Hashable | None
    """Hash of the block before the first one; None at the beginning of a text."""
    token_ids: Sequence[int]
    """Token ids of all these blocks."""
    namespace: int = 0
    """Namespace, as in ``use_namespaces``."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Event: lookups find these blocks no more."""

    block_hashes: Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Event: lookups find none of the blocks that were stored before."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of blocks between two tiers of a cache, or from a prefill cache, in flight."""

    id: int | str
    """Number or name that no other transfer has while this one is in flight."""
    kind: Literal["load", "store", "move", "receive"]
    """Direction: ``"load"`` into the first tier, ``"store"`` out of it, ``"move"`` between other
    tiers, or ``"receive"`` from a prefill cache."""
    blocks: Sequence[int] = ()
    """Blocks of the first tier that it reads or writes, in the order of their tokens."""
    seq: int | None = None
    """Sequence that a load or a receive is for; None for a store or a move, and for a receive that
    was cancelled."""
    moved: int = 0
    """Number of blocks of a move."""
    held_blocks: Sequence[int] = ()
    """Further blocks of the first tier that are not free until it ends, such as the prefix that a
    cancelled sequence had found."""

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) or self.moved


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a transfer, which the adapter brings about."""

    arrived: int
    """First blocks that are copied; the data of the others is lost."""
    reported: int
    """First blocks that are reported to the cache as copied: all of them if it succeeds, none if it
    fails."""
    reports: int = 1
    """Times that the result is reported."""
    full: bool = False
    """True if it fails because the tier that it writes to has no space."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that a cache must refuse, or that must leave no trace."""

    description: str
    """The call in words, as in "free_blocks with a block of another layer"."""
    call: Callable[[], object]
    errors: tuple[type[BaseException], ...] = ()
    """Accepted errors: the call must raise one of them; empty for a valid call that undoes
    itself."""


# Fast paths, as an adapter declares them


@dataclass(frozen=True, slots=True)
class FastPath:
    """A fast path of a cache or engine: its slow twin, and when it can and cannot run.

    A setting maps switches of ``option_choices`` to values, as in ``{"fused": True,
    "min_batch": 1}``. It applies if each of these switches has its value.
    """

    equals: str
    """Slow path whose results it must reproduce, by its name in ``path_counts``; its own name for a
    slow path, which is declared only if some settings rule it out."""
    runs_with: Sequence[Mapping[str, Any]] = ()
    """Settings that allow it to run, each alone: counting it while a switch contradicts each of
    them is a failure. May be empty if it can run with the first choice of every switch."""
    never_with: Sequence[Mapping[str, Any]] = ()
    """Settings that each rule it out: counting it under one is a failure."""
    device: str | None = None
    """The only kind of device that it can run on, such as ``"cuda"``; None for any device."""
    share: float = 1.0
    """Examples that aim at it, relative to another path; below 1 for one that takes long."""
    one_position: bool = False
    """True if it can only write when all rows go to the same position of a block."""
    aims: Sequence[Mapping[str, Any]] = ()
    """Settings of the examples that aim at it, which may be stricter than ``runs_with``, such as
    the smallest limit of a step; ``runs_with`` if empty."""

    def __post_init__(self) -> None:
        if not isinstance(self.equals, str):
            raise TypeError(f"equals={self.equals!r}: expected the name of a slow path")
        for name in ("runs_with", "never_with", "aims"):
            settings = getattr(self, name)
            if isinstance(settings, Mapping):
                raise TypeError(
                    f"{name}={settings!r}: expected several settings, as in [{settings!r}]"
                )
        if not self.share > 0:
            raise TypeError(f"share={self.share!r}: expected a number above 0")

    @property
    def settings_to_draw(self) -> Sequence[Mapping[str, Any]]:
        """Settings of the examples that aim at it; empty if any example may reach it."""
        return self.aims or self.runs_with

    def runs_on(self, device: str) -> bool:
        return self.device in (None, device.partition(":")[0])

    def can_run(self, options: Mapping[str, Any], device: str) -> bool:
        """Return True if it can run on this device with these switches."""
        return self.runs_on(device) and not self.describe_exclusion(options)

    def describe_exclusion(self, options: Mapping[str, Any]) -> str:
        """Describe why these switches exclude it, as the end of a sentence; empty if they do not.

        A switch that ``options`` has no value for excludes no path.
        """
        for setting in self.never_with:
            if setting.items() <= options.items():
                return f"which {_describe_setting(setting)} rules out"
        missing = [
            {name: value for name, value in setting.items() if options.get(name, value) != value}
            for setting in self.runs_with
        ]
        if not missing or not all(missing):
            return ""
        nearest = [each for each in missing if len(each) == min(map(len, missing))]
        needed = dict.fromkeys(map(_describe_setting, nearest))
        actual = {name: options[name] for each in nearest for name in each}
        return f"which needs {' or '.join(needed)}, under {_describe_setting(actual)}"


def _describe_setting(setting: Mapping[str, Any]) -> str:
    return " with ".join(f"{name}={value!r}" for name, value in setting.items())


# Tolerances of quantised caches


SCALE_SCOPES = ("token", "block")
MAX_RELATIVE_ERROR = 0.25
"""Largest ``of_greatest``; above it, one token could pass for another."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference between values that are written and those that are read back."""

    of_greatest: float
    """Largest error, as a fraction of the largest magnitude that shares the scale: 1/254 for a
    scale that maps this magnitude to 127, plus a little for rounding the scale; 1/16 for
    ``float8_e4m3fn``."""
    over: str = "token"
    """Values that share one scale: all heads of a ``"token"``, or all that was written to its
    ``"block"`` since that was taken. Keys, values and layers have scales apart in either case."""
    tensors: str = "float32"
    """Dtype of the tensors that the cache receives and returns."""


@dataclass(frozen=True, slots=True)
class AuxiliaryVector:
    """A vector that each layer stores of a token in addition to its keys and values."""

    width: int
    """Number of elements."""
    dtype: str | None = None
    """Name of the torch dtype, such as ``"uint8"`` for bytes that pack codes and scales; None for
    that of the keys that are written."""
    of_greatest: float = 0.0
    """Largest error, as a fraction of the vector's largest magnitude, for a cache that quantises
    it; 0 if it must read back bit for bit."""


def is_dtype(value: object) -> bool:
    """Return True for the name of a floating-point dtype of torch."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


# Shapes for devices that compile kernels: few, since each new shape costs seconds there.
#
# Combinations of sizes are searched on a CPU, where Triton's kernels are interpreted and a shape
# costs nothing; a GPU tests the compiler and the hardware with each size.


_T = TypeVar("_T")
Shape = tuple[tuple[int, ...], str]
"""Key of a compiled kernel: number of heads, head size and block size; and a dtype."""


class Bounds(NamedTuple):
    """Largest numbers of elements of a token and of a block."""

    token_elements: int
    block_elements: int

    def allow(self, num_heads: int, head_dim: int, block_size: int) -> bool:
        token_elements = num_heads * head_dim
        return (
            token_elements <= self.token_elements
            and token_elements * block_size <= self.block_elements
        )


@cache
def choose_shapes(
    head_counts: tuple[int, ...],
    head_dims: tuple[int, ...],
    block_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    bounds: Bounds,
) -> tuple[Shape, ...]:
    """Choose shapes, alternately small and large, so that each allowed size occurs in one."""
    choices = head_counts, head_dims, block_sizes
    allowed = [sizes for sizes in product(*choices) if bounds.allow(*sizes)]
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
    """Keep the first choice and one other that depends on the shape."""
    others = choices[1:]
    at = spec.num_heads + spec.head_dim + 2 * spec.block_size
    return [choices[0], others[at % len(others)]] if others else choices


class ReuseCondition(NamedTuple):
    """A condition that the harness counts from the return values of one method."""

    method: str
    description: str


REUSE_CONDITIONS: Mapping[str, ReuseCondition] = {
    "handle_used_again": ReuseCondition(
        "reserve",
        "``reserve`` returns an object or a number that it returned before and that was filled "
        "since. Needs ``reserve``.",
    ),
    "slot_used_again": ReuseCondition(
        "container",
        "A sequence begins in a slot that ``container`` showed for another one, which has left "
        "it. Needs ``container``.",
    ),
    "list_used_again": ReuseCondition(
        "container",
        "A sequence begins in a list object that ``container`` showed for another one, which has "
        "left it. Needs ``container``.",
    ),
    "block_used_while_absent": ReuseCondition(
        "table",
        "A sequence gets a block of another one that was preempted or swapped out and is not back; "
        "counted for each such block of the first layer. Needs ``table``.",
    ),
}
"""Conditions that the harness counts where an adapter names them and defines their methods."""


def refuse_unobservable_conditions(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a condition whose method the adapter does not define."""
    for name, each in REUSE_CONDITIONS.items():
        if name in adapter.conditions and each.method not in adapter.abilities:
            raise TypeError(
                f"{adapter.__name__}.conditions names {name!r}: define {each.method}(), which "
                "shows it"
            )


HARNESS_CONDITIONS: Mapping[str, str] = {
    "last_position": "A row begins at the last position of a block that already holds other "
    "tokens; counted for each such row.",
    "out_of_room_mid_batch": "A write of several rows is refused although its first row alone "
    "would fit. Only a cache with a ``ledger`` runs out of room.",
    "name_used_again": "A sequence begins, by a write or a fork, under the name of one that was "
    "freed; counted for each such sequence.",
}
"""Conditions that the harness counts where an adapter names them."""
PREFIX_HIT_METHODS = frozenset(
    ("use_tokens", "match_prefix", "prefill", "table", "ledger", "prefixes.shares=equal prefixes")
)
"""Features that a cache needs to show that a sequence began with a stored prefix."""
