"""A pytest plugin that searches for inputs that make a KV cache return wrong keys or values.

To test a cache of your own, write one class and one line in a test file::

    import torch
    from pytest_roseinfer import KVCacheAdapter, conformance

    class ListCache(KVCacheAdapter):
        def make(self, spec):
            self.spec, self.rows = spec, {}

        def append(self, seqs, key, value):              # [layers, len(seqs), heads, head_dim]
            dtype = getattr(torch, self.spec.dtype)
            for i, seq in enumerate(seqs):
                new = torch.stack([key[:, i], value[:, i]]).to(dtype)
                self.rows.setdefault(seq, []).append(new)

        def peek(self, seq, layer):                      # [tokens, heads, head_dim], K and V
            kv = torch.stack(self.rows[seq], dim=2)
            return kv[0, layer], kv[1, layer]

    TestListCache = conformance(ListCache)

Run ``pytest``. Optional methods (``fork``, ``free``, ``prefill``, ...) are tested when the class
defines them; ``KVCacheAdapter`` documents each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.cache import KVCacheAdapter as KVCacheAdapter
    from pytest_roseinfer.adapters.engine import EngineAdapter as EngineAdapter
    from pytest_roseinfer.adapters.engine import RequestMix as RequestMix
    from pytest_roseinfer.adapters.engine import RequestSpec as RequestSpec
    from pytest_roseinfer.adapters.engine import Sampling as Sampling
    from pytest_roseinfer.adapters.sharded import ShardedAdapter as ShardedAdapter
    from pytest_roseinfer.capabilities.cache_data import AllBlocksCleared as AllBlocksCleared
    from pytest_roseinfer.capabilities.cache_data import AuxiliaryVector as AuxiliaryVector
    from pytest_roseinfer.capabilities.cache_data import BadCall as BadCall
    from pytest_roseinfer.capabilities.cache_data import BlockRemoved as BlockRemoved
    from pytest_roseinfer.capabilities.cache_data import BlockStored as BlockStored
    from pytest_roseinfer.capabilities.cache_data import CacheFull as CacheFull
    from pytest_roseinfer.capabilities.cache_data import CacheSpec as CacheSpec
    from pytest_roseinfer.capabilities.cache_data import FastPath as FastPath
    from pytest_roseinfer.capabilities.cache_data import Ledger as Ledger
    from pytest_roseinfer.capabilities.cache_data import Tolerance as Tolerance
    from pytest_roseinfer.capabilities.cache_data import Transfer as Transfer
    from pytest_roseinfer.capabilities.cache_data import TransferResult as TransferResult
    from pytest_roseinfer.capabilities.disaggregation import RemoteTraits as RemoteTraits
    from pytest_roseinfer.capabilities.prefixes import PrefixTraits as PrefixTraits
    from pytest_roseinfer.capabilities.simulated_device import DeviceQueue as DeviceQueue
    from pytest_roseinfer.capabilities.text_keys import KeyPart as KeyPart
    from pytest_roseinfer.capabilities.tiers import TierTraits as TierTraits
    from pytest_roseinfer.capabilities.truncation import TruncationTraits as TruncationTraits
    from pytest_roseinfer.capabilities.windows import WindowTraits as WindowTraits
    from pytest_roseinfer.engine_capabilities.prefix_reuse import (
        PrefixReuseTraits as PrefixReuseTraits,
    )
    from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits as SamplingTraits
    from pytest_roseinfer.engines.run import MixDivergence as MixDivergence
    from pytest_roseinfer.engines.run import run_forks as run_forks
    from pytest_roseinfer.engines.run import run_mix as run_mix
    from pytest_roseinfer.findings.divergence import Divergence as Divergence
    from pytest_roseinfer.histories.history import History as History
    from pytest_roseinfer.oracle.oracle import Oracle as Oracle
    from pytest_roseinfer.oracle.texts import KeySpan as KeySpan
    from pytest_roseinfer.oracle.texts import TextKey as TextKey
    from pytest_roseinfer.run.machine import run_history as run_history
    from pytest_roseinfer.suite.conformance import conformance as conformance
    from pytest_roseinfer.targets.block_manager import BlockManagerAdapter as BlockManagerAdapter
    from pytest_roseinfer.targets.paged_kernels import PagedKernelsAdapter as PagedKernelsAdapter

_NAMES = {
    "adapters.cache": ("KVCacheAdapter",),
    "adapters.engine": (
        "EngineAdapter",
        "RequestMix",
        "RequestSpec",
        "Sampling",
    ),
    "adapters.sharded": ("ShardedAdapter",),
    "capabilities.cache_data": (
        "AllBlocksCleared",
        "AuxiliaryVector",
        "BadCall",
        "BlockRemoved",
        "BlockStored",
        "CacheFull",
        "CacheSpec",
        "FastPath",
        "Ledger",
        "Tolerance",
        "Transfer",
        "TransferResult",
    ),
    "capabilities.disaggregation": ("RemoteTraits",),
    "capabilities.prefixes": ("PrefixTraits",),
    "capabilities.simulated_device": ("DeviceQueue",),
    "capabilities.text_keys": ("KeyPart",),
    "capabilities.tiers": ("TierTraits",),
    "capabilities.truncation": ("TruncationTraits",),
    "capabilities.windows": ("WindowTraits",),
    "engine_capabilities.prefix_reuse": ("PrefixReuseTraits",),
    "engine_capabilities.sampling": ("SamplingTraits",),
    "engines.run": (
        "MixDivergence",
        "run_forks",
        "run_mix",
    ),
    "findings.divergence": ("Divergence",),
    "histories.history": ("History",),
    "oracle.oracle": ("Oracle",),
    "oracle.texts": (
        "KeySpan",
        "TextKey",
    ),
    "run.machine": ("run_history",),
    "suite.conformance": ("conformance",),
    "targets.block_manager": ("BlockManagerAdapter",),
    "targets.paged_kernels": ("PagedKernelsAdapter",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pytest_roseinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
