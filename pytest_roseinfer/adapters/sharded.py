"""A cache on tensor-parallel ranks; each rank stores some of the heads.

Every call goes to all ranks, each with its own heads of the written tensors. The tensors that ranks
return are concatenated; their tables and ledgers are compared by an invariant.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.capability import RankPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]

_T = TypeVar("_T")


class RankMismatch(Exception):
    """Error for ranks that did not all return equal values, or raise errors of one type."""


class ShardedAdapter(KVCacheAdapter):
    """A cache on several ranks, with the capabilities of the adapter ``of`` one rank's cache.

    Bad calls are left to the tests of that adapter.
    """

    of: ClassVar[type[KVCacheAdapter]]
    """Adapter of one rank's cache."""
    ranks: ClassVar[int] = 2
    """Number of ranks."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not hasattr(cls, "of"):
            raise TypeError(f"{cls.__name__}.of must name the adapter of one rank's cache")
        if vars(cls).keys() & {"of", "ranks"}:
            for name, value in cls._taken_over().items():
                if name not in vars(cls):
                    setattr(cls, name, value)
        if any(count % cls.ranks for count in cls.head_counts):
            raise TypeError(
                f"{cls.__name__}.head_counts must be multiples of its {cls.ranks} ranks"
            )
        super().__init_subclass__(**kwargs)

    @classmethod
    def _taken_over(cls) -> Mapping[str, Any]:
        """Return the declarations of the adapter of one rank, for all ranks, and its methods."""
        names = {name for each in KVCacheAdapter.declaring() for name in get_annotations(each)}
        names -= _LEFT_TO_ONE_RANK
        return {
            **{name: getattr(cls.of, name) for name in names},
            "head_counts": tuple(count * cls.ranks for count in cls.of.head_counts),
            # The handles of all ranks are returned as one list, which is a new object each time.
            "conditions": [name for name in cls.of.conditions if name != "handle_used_again"],
            **_methods_of_all_ranks(cls.of),
        }

    def rank(self, at: int) -> KVCacheAdapter:  # noqa: ARG002
        """Return the adapter of a rank, before ``make``; override it for adapters that differ."""
        return self.of()

    def make(self, spec: CacheSpec) -> None:
        self.caches = [self.rank(at) for at in range(self.ranks)]
        for cache in self.caches:
            cache.make(self.share(spec))
        self.scratch_blocks = self.caches[0].scratch_blocks

    @classmethod
    def share(cls, spec: CacheSpec) -> CacheSpec:
        """Return the spec of one rank's cache."""
        return replace(spec, num_heads=spec.num_heads // cls.ranks)

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:
        return cls.of.can_truncate(cls.share(spec), stored, length)

    @classmethod
    def checkpoints(
        cls, spec: CacheSpec, recorded: Sequence[int], begin: int, end: int
    ) -> Iterable[int]:
        return cls.of.checkpoints(cls.share(spec), recorded, begin, end)

    def shards(self) -> Sequence[KVCacheAdapter]:
        return self.caches

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.write("append", seqs, key, value)

    def peek(self, seq: int, layer: int) -> Pair:
        return self.read("peek", seq, layer)

    # Calls to all ranks

    def each(self, call: Callable[[int, KVCacheAdapter], _T]) -> list[_T]:
        """Call a function for every rank; raise the error that all of them raise."""
        answers: list[_T] = []
        errors: dict[int, Exception] = {}
        for at, cache in enumerate(self.caches):
            try:
                answers.append(call(at, cache))
            except Exception as error:
                errors[at] = error
        if len(errors) == len(self.caches) and len({*map(type, errors.values())}) == 1:
            raise errors[0]
        if errors:
            parts = [
                f"rank {at} raised {type(raised).__name__}: {raised}"
                for at, raised in errors.items()
            ]
            if answers:
                parts.append(f"{len(answers)} of {len(self.caches)} ranks raised nothing")
            raise RankMismatch("; ".join(parts)) from next(iter(errors.values()))
        return answers

    def heads(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Split ``[..., heads, head_dim]`` tensors into the heads of each rank."""
        return list(zip(*(each.chunk(self.ranks, -2) for each in tensors), strict=True))

    def require_equal_answers(self, name: str, answers: Sequence[_T]) -> _T:
        """Return the value that all ranks returned; raise ``RankMismatch`` if they differ."""
        if any(answer != answers[0] for answer in answers):
            values = ", ".join(map(str, answers))
            raise RankMismatch(f"{name} is {values} on ranks 0 to {self.ranks - 1}")
        return answers[0]

    def write(self, name: str, *arguments: Any) -> None:
        """Pass every rank its heads of the keys and values, which are the last arguments."""
        *others, key, value = arguments
        heads = self.heads(key, value)
        self.each(lambda at, cache: getattr(cache, name)(*others, *heads[at]))

    def read(self, name: str, *arguments: Any) -> Pair:
        """Concatenate the heads that the ranks return."""
        shards: list[Pair] = self.every(name, *arguments)
        keys, values = (torch.cat(parts, 1) for parts in zip(*shards, strict=True))
        return keys, values

    def stored(self, name: str) -> Pair:
        """Return a copy of the storage of all ranks, up to the last block that all have."""
        shown: list[Pair] = [getattr(cache, name)() for cache in self.caches]
        fewest = min(keys.shape[1] for keys, _ in shown)
        keys, values = (
            torch.cat([each[:, :fewest] for each in parts], 2) for parts in zip(*shown, strict=True)
        )
        return keys, values

    def same(self, name: str, *arguments: Any) -> Any:
        """Return the value that all ranks must return."""
        return self.require_equal_answers(name, self.every(name, *arguments))

    def every(self, name: str, *arguments: Any) -> list[Any]:
        """Return the value of each rank."""
        return self.each(lambda _, cache: getattr(cache, name)(*arguments))

    def first(self, name: str, *arguments: Any) -> Any:
        """Return the value of rank 0."""
        return getattr(self.caches[0], name)(*arguments)


_LEFT_TO_ONE_RANK = {"standard_bad_calls", "bad_call_errors"}
_COMBINE_METHODS: Mapping[RankPolicy, Callable[..., Any]] = {
    RankPolicy.WRITE: ShardedAdapter.write,
    RankPolicy.READ: ShardedAdapter.read,
    RankPolicy.STORED: ShardedAdapter.stored,
    RankPolicy.SAME: ShardedAdapter.same,
    RankPolicy.EACH: ShardedAdapter.every,
    RankPolicy.FIRST: ShardedAdapter.first,
}


def _methods_of_all_ranks(adapter: type[KVCacheAdapter]) -> Mapping[str, Callable[..., Any]]:
    """Return a method for all ranks for each one that the adapter of one rank defines."""
    return {
        name: _combine(how, name) if isinstance(how, RankPolicy) else how
        for capability in adapter.capabilities
        for name, how in capability.sharded.items()
        if name in adapter.abilities
    }


def _combine(how: RankPolicy, name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _COMBINE_METHODS[how](self, name, *arguments)
