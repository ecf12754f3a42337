"""The one class a downstream user writes: how the harness drives somebody's KV cache."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.capabilities.attention import AttentionMethods
from pytest_roseinfer.capabilities.bad_calls import BadCallMethods
from pytest_roseinfer.capabilities.books import BookMethods
from pytest_roseinfer.capabilities.cache_data import CacheFull
from pytest_roseinfer.capabilities.counting import CountingMethods
from pytest_roseinfer.capabilities.device_queue import QueueMethods
from pytest_roseinfer.capabilities.forks import ForkMethods
from pytest_roseinfer.capabilities.freeing import FreeingMethods
from pytest_roseinfer.capabilities.preemption import PreemptionMethods
from pytest_roseinfer.capabilities.prefixes import PrefixMethods
from pytest_roseinfer.capabilities.quantisation import QuantisationMethods
from pytest_roseinfer.capabilities.reading import ReadingMethods
from pytest_roseinfer.capabilities.shards import ShardMethods
from pytest_roseinfer.capabilities.storage import StorageMethods
from pytest_roseinfer.capabilities.swapping import SwappingMethods
from pytest_roseinfer.capabilities.switches import SwitchMethods
from pytest_roseinfer.capabilities.truncation import TruncationMethods
from pytest_roseinfer.capabilities.windows import WindowMethods
from pytest_roseinfer.capabilities.writes import WriteMethods

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import CacheSpec


class KVCacheAdapter(
    BookMethods,
    ReadingMethods,
    ForkMethods,
    FreeingMethods,
    WriteMethods,
    SwitchMethods,
    CountingMethods,
    AttentionMethods,
    StorageMethods,
    TruncationMethods,
    PrefixMethods,
    PreemptionMethods,
    SwappingMethods,
    WindowMethods,
    QueueMethods,
    QuantisationMethods,
    ShardMethods,
    BadCallMethods,
    Adapter,
):
    """Override ``make``, ``append`` and ``peek``; everything else is optional.

    Sequences are named by integers of the harness's choosing; a name never seen before, or
    freed since, is an empty sequence. Tensors are ``[layers, tokens, heads, head_dim]``.

    An optional method is tested when it is overridden. Where one is nothing without another, a
    class with one of them alone is refused. All stand in the order in which one would add them to
    a cache.
    """

    full_errors: ClassVar[tuple[type[BaseException], ...]] = (CacheFull,)
    """The errors that ``append`` and others raise, changing nothing, when there is no room."""
    atomic_batches: ClassVar[bool] = True
    """An append that finds no room for all its rows stores none. False for a cache that admits row
    by row, as vLLM's scheduler does: the rows ahead of the first that finds no room are stored, and
    neither that one nor any behind it. It raises one of ``full_errors`` all the same. ``reserve``
    stays all or nothing, since its answer stands for all rows."""
    dtypes: ClassVar[Sequence[str]] = ("float32", "float16", "bfloat16")
    """Dtypes the cache can be built with."""
    head_counts: ClassVar[Sequence[int]] = (1, 2, 3, 40)
    """Numbers of KV heads the cache can be built with, drawn for ``spec.num_heads``."""
    head_dims: ClassVar[Sequence[int]] = (4, 1, 5, 8, 64, 80, 96, 128, 256)
    """Head sizes the cache can be built with. Small ones are drawn most, and large ones with few
    heads and short blocks as far as there are any."""
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3, 5, 8, 16, 128)
    """Numbers of tokens in a block that the cache can be built with."""
    most_sequences: ClassVar[int | None] = None
    """How many sequences the cache is made for at a time, where slots or a kernel bound them; None
    if nothing does. Histories have more than 6 only to see that many rows do no harm."""
    most_tokens: ClassVar[int | None] = None
    """How many tokens of one sequence it is made for, if not for as many as its blocks hold."""

    def make(self, spec: CacheSpec) -> None:
        """Build an empty cache of this shape."""
        raise NotImplementedError(f"{type(self).__name__} must define make(spec)")

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Append token ``i`` of ``[layers, len(seqs), heads, head_dim]`` to ``seqs[i]``.

        Where an adapter defines ``append_many``, that does for this, with a token of each.
        """
        if not self.defines("append_many"):
            raise NotImplementedError(f"{type(self).__name__} must define append(seqs, key, value)")
        self.append_many(seqs, [1] * len(seqs), key, value)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is stored for a sequence in one layer, ``[tokens, heads, head_dim]`` each.

        Read it by another route than the cache's own if there is one.
        """
        raise NotImplementedError(f"{type(self).__name__} must define peek(seq, layer)")
