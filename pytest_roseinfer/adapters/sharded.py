"""One cache in parts: ranks of tensor parallelism, each of which keeps some of the heads.

Every rank is told to do the same, and gets its own heads of what is written. What the ranks return
is put together; what they keep in their books is compared by an invariant.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.capability import Across

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]

_T = TypeVar("_T")


class RanksDisagree(Exception):
    """Some ranks raised an error and others did not, or another one, or they answered otherwise."""


class ShardedAdapter(KVCacheAdapter):
    """A cache on several ranks. Name the adapter of one rank's cache, and this offers what it does.

    Calls that must be refused are left to the tests of that adapter alone.
    """

    of: ClassVar[type[KVCacheAdapter]]
    """The adapter of one rank's cache."""
    ranks: ClassVar[int] = 2

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
        """What the adapter of one rank says, as it is for all, and the methods it defines."""
        said = {name for each in KVCacheAdapter.declaring() for name in get_annotations(each)}
        said -= _LEFT_TO_ONE_RANK
        return {
            **{name: getattr(cls.of, name) for name in said},
            "head_counts": tuple(count * cls.ranks for count in cls.of.head_counts),
            # Several handles are handed out as one list, which is a new one each time.
            "conditions": [name for name in cls.of.conditions if name != "handle_used_again"],
            **_offered(cls.of),
        }

    def rank(self, at: int) -> KVCacheAdapter:  # noqa: ARG002
        """Return a rank's cache, which is not made yet. Replace this if it must know its rank."""
        return self.of()

    def make(self, spec: CacheSpec) -> None:
        self.caches = [self.rank(at) for at in range(self.ranks)]
        for cache in self.caches:
            cache.make(self.share(spec))
        self.scratch_blocks = self.caches[0].scratch_blocks

    @classmethod
    def share(cls, spec: CacheSpec) -> CacheSpec:
        return replace(spec, num_heads=spec.num_heads // cls.ranks)

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:
        return cls.of.can_truncate(cls.share(spec), stored, length)

    def shards(self) -> Sequence[KVCacheAdapter]:
        return self.caches

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.write("append", seqs, key, value)

    def peek(self, seq: int, layer: int) -> Pair:
        return self.read("peek", seq, layer)

    # ---------------------------------------------------------- what the other methods do

    def each(self, call: Callable[[int, KVCacheAdapter], _T]) -> list[_T]:
        """Have every rank do something; raise what all of them raise."""
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
            said = [f"rank {at} raised {type(why).__name__}: {why}" for at, why in errors.items()]
            if answers:
                said.append(f"{len(answers)} of {len(self.caches)} ranks raised nothing")
            raise RanksDisagree("; ".join(said)) from next(iter(errors.values()))
        return answers

    def heads(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return for each rank its heads of ``[..., heads, head_dim]`` tensors."""
        return list(zip(*(each.chunk(self.ranks, -2) for each in tensors), strict=True))

    def agreed(self, name: str, answers: Sequence[_T]) -> _T:
        """Return the answer that all ranks gave; raise where they differ."""
        if any(answer != answers[0] for answer in answers):
            said = ", ".join(map(str, answers))
            raise RanksDisagree(f"{name} is {said} on ranks 0 to {self.ranks - 1}")
        return answers[0]

    def write(self, name: str, *arguments: Any) -> None:
        """Hand every rank its heads of keys and values, which come last."""
        *others, key, value = arguments
        heads = self.heads(key, value)
        self.each(lambda at, cache: getattr(cache, name)(*others, *heads[at]))

    def read(self, name: str, *arguments: Any) -> Pair:
        """Put together what each rank returns of its heads."""
        found: list[Pair] = self.every(name, *arguments)
        keys, values = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        return keys, values

    def stored(self, name: str) -> Pair:
        """Return a copy of what all ranks store, as far as all have these blocks."""
        shown: list[Pair] = [getattr(cache, name)() for cache in self.caches]
        fewest = min(keys.shape[1] for keys, _ in shown)
        keys, values = (
            torch.cat([each[:, :fewest] for each in parts], 2) for parts in zip(*shown, strict=True)
        )
        return keys, values

    def same(self, name: str, *arguments: Any) -> Any:
        """Return what all ranks answer alike."""
        return self.agreed(name, self.every(name, *arguments))

    def every(self, name: str, *arguments: Any) -> list[Any]:
        """Return the answer of each rank."""
        return self.each(lambda _, cache: getattr(cache, name)(*arguments))

    def first(self, name: str, *arguments: Any) -> Any:
        """Return the answer of rank 0."""
        return getattr(self.caches[0], name)(*arguments)


_LEFT_TO_ONE_RANK = {"standard_bad_calls", "bad_call_errors"}
_TOGETHER: Mapping[Across, Callable[..., Any]] = {
    Across.WRITE: ShardedAdapter.write,
    Across.READ: ShardedAdapter.read,
    Across.STORED: ShardedAdapter.stored,
    Across.SAME: ShardedAdapter.same,
    Across.EACH: ShardedAdapter.every,
    Across.FIRST: ShardedAdapter.first,
}


def _offered(adapter: type[KVCacheAdapter]) -> Mapping[str, Callable[..., Any]]:
    """Return what ranks do for each method that the adapter of one rank defines."""
    return {
        name: _together(how, name) if isinstance(how, Across) else how
        for capability in adapter.capabilities
        for name, how in capability.sharded.items()
        if name in adapter.abilities
    }


def _together(how: Across, name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _TOGETHER[how](self, name, *arguments)
