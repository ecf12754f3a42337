"""The base class of adapters, which let the harness drive a user's KV cache."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.capabilities.attention import AttentionMethods
from pytest_roseinfer.capabilities.auxiliary_vectors import AuxiliaryVectorMethods
from pytest_roseinfer.capabilities.bad_calls import BadCallMethods
from pytest_roseinfer.capabilities.beams import BeamMethods
from pytest_roseinfer.capabilities.block_tables import BlockTableMethods
from pytest_roseinfer.capabilities.cache_data import CacheFull
from pytest_roseinfer.capabilities.counting import CountingMethods
from pytest_roseinfer.capabilities.device_queue import QueueMethods
from pytest_roseinfer.capabilities.disaggregation import DisaggregationMethods
from pytest_roseinfer.capabilities.draft_trees import DraftTreeMethods
from pytest_roseinfer.capabilities.epochs import EpochMethods
from pytest_roseinfer.capabilities.events import EventMethods
from pytest_roseinfer.capabilities.forks import ForkMethods
from pytest_roseinfer.capabilities.freeing import FreeingMethods
from pytest_roseinfer.capabilities.preemption import PreemptionMethods
from pytest_roseinfer.capabilities.prefixes import PrefixMethods
from pytest_roseinfer.capabilities.quantisation import QuantisationMethods
from pytest_roseinfer.capabilities.reading import ReadingMethods
from pytest_roseinfer.capabilities.sessions import SessionMethods
from pytest_roseinfer.capabilities.shards import ShardMethods
from pytest_roseinfer.capabilities.states import StateMethods
from pytest_roseinfer.capabilities.storage import StorageMethods
from pytest_roseinfer.capabilities.swapping import SwappingMethods
from pytest_roseinfer.capabilities.switches import SwitchMethods
from pytest_roseinfer.capabilities.text_keys import TextKeyMethods
from pytest_roseinfer.capabilities.tiers import TierMethods
from pytest_roseinfer.capabilities.truncation import TruncationMethods
from pytest_roseinfer.capabilities.windows import WindowMethods
from pytest_roseinfer.capabilities.writes import WriteMethods

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import CacheSpec


class KVCacheAdapter(
    BlockTableMethods,
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
    StateMethods,
    AuxiliaryVectorMethods,
    TierMethods,
    WindowMethods,
    EpochMethods,
    TextKeyMethods,
    EventMethods,
    DraftTreeMethods,
    BeamMethods,
    DisaggregationMethods,
    SessionMethods,
    QueueMethods,
    QuantisationMethods,
    ShardMethods,
    BadCallMethods,
    Adapter,
):
    """Override ``make``, ``append`` and ``peek``; everything else is optional.

    Sequences are named by integers that the harness chooses; a name that is new, or whose sequence
    was freed, is an empty sequence. Tensors are ``[layers, tokens, heads, head_dim]``.

    An optional method is tested if it is overridden. A class that defines a method without another
    one that it needs is refused. The methods are listed in the order of adding them to a cache.
    """

    _renamed: ClassVar = {"most_sequences": "max_sequences", "most_tokens": "max_tokens"}

    full_errors: ClassVar[tuple[type[BaseException], ...]] = (CacheFull,)
    """Errors for a lack of room: ``append`` and others raise one of them, and change nothing."""
    atomic_batches: ClassVar[bool] = True
    """True if an append without room for all its rows stores none. False for a cache that admits
    row by row, as vLLM's scheduler does: rows before the first one without room are stored, that
    one and later rows are not, and one of ``full_errors`` is still raised. ``reserve``, ``prefill``
    and ``fork`` are all or nothing either way."""
    dtypes: ClassVar[Sequence[str]] = ("float32", "float16", "bfloat16")
    """Dtypes that the cache can be built with."""
    head_counts: ClassVar[Sequence[int]] = (1, 2, 3, 40)
    """Numbers of KV heads that the cache can be built with, drawn for ``spec.num_heads``."""
    head_dims: ClassVar[Sequence[int]] = (4, 1, 5, 8, 64, 80, 96, 128, 256)
    """Elements per head that the cache can be built with. Small sizes are drawn most, and large
    ones with few heads and small blocks, if such are listed."""
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3, 5, 8, 16, 128)
    """Tokens per block that the cache can be built with."""
    max_sequences: ClassVar[int | None] = None
    """Most sequences at a time, 6 or more, if slots or a kernel limit them; None if unlimited. Only
    large histories have more than 6."""
    max_tokens: ClassVar[int | None] = None
    """Most tokens of one sequence, 16 or more; None if only the number of blocks limits them."""

    def make(self, spec: CacheSpec) -> None:
        """Build an empty cache of this shape."""
        raise NotImplementedError(f"{type(self).__name__} must define make(spec)")

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Append token ``i`` of ``[layers, len(seqs), heads, head_dim]`` to ``seqs[i]``.

        A name that is new, or whose sequence was freed, is an empty sequence. An adapter that
        defines ``append_many`` may leave this out.
        """
        if not self.defines("append_many"):
            raise NotImplementedError(f"{type(self).__name__} must define append(seqs, key, value)")
        self.append_many(seqs, [1] * len(seqs), key, value)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored keys and values of a sequence, ``[tokens, heads, head_dim]`` each.

        Read them without the cache's own reading code if possible. It is called after every step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define peek(seq, layer)")
