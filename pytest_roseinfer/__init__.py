"""A pytest plugin that hunts for any input on which a KV cache and the truth differ.

To test a cache of your own, write one class and one line in a test file::

    import torch
    from pytest_roseinfer import KVCacheAdapter, conformance

    class ListCache(KVCacheAdapter):
        def make(self, spec):
            self.spec, self.rows = spec, {}

        def append(self, seqs, key, value):              # [layers, len(seqs), heads, head_dim]
            dtype = getattr(torch, self.spec.dtype)
            for i, seq in enumerate(seqs):
                self.rows.setdefault(seq, []).append(
                    torch.stack([key[:, i], value[:, i]]).to(dtype))

        def peek(self, seq, layer):                      # [tokens, heads, head_dim], K and V
            kv = torch.stack(self.rows[seq], dim=2)
            return kv[0, layer], kv[1, layer]

    TestListCache = conformance(ListCache)

Run ``pytest``. What else a cache can do (``fork``, ``free``, ``prefill``, ...) is tested when
the class defines it; ``KVCacheAdapter`` documents each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_roseinfer.adapter import CacheFull as CacheFull
    from pytest_roseinfer.adapter import CacheSpec as CacheSpec
    from pytest_roseinfer.adapter import KVCacheAdapter as KVCacheAdapter
    from pytest_roseinfer.adapter import Ledger as Ledger
    from pytest_roseinfer.bad_calls import BadCall as BadCall
    from pytest_roseinfer.checks import conformance as conformance
    from pytest_roseinfer.divergence import Divergence as Divergence
    from pytest_roseinfer.engines.adapter import EngineAdapter as EngineAdapter
    from pytest_roseinfer.engines.mix import Asked as Asked
    from pytest_roseinfer.engines.mix import RequestMix as RequestMix
    from pytest_roseinfer.engines.mix import Sampling as Sampling
    from pytest_roseinfer.engines.run import MixDivergence as MixDivergence
    from pytest_roseinfer.engines.run import run_forks as run_forks
    from pytest_roseinfer.engines.run import run_mix as run_mix
    from pytest_roseinfer.fast_path import FastPath as FastPath
    from pytest_roseinfer.history import History as History
    from pytest_roseinfer.machine import run_history as run_history
    from pytest_roseinfer.model import Oracle as Oracle

_HOMES = {
    "Asked": "pytest_roseinfer.engines.mix",
    "BadCall": "pytest_roseinfer.bad_calls",
    "CacheFull": "pytest_roseinfer.adapter",
    "CacheSpec": "pytest_roseinfer.adapter",
    "Divergence": "pytest_roseinfer.divergence",
    "EngineAdapter": "pytest_roseinfer.engines.adapter",
    "FastPath": "pytest_roseinfer.fast_path",
    "History": "pytest_roseinfer.history",
    "KVCacheAdapter": "pytest_roseinfer.adapter",
    "Ledger": "pytest_roseinfer.adapter",
    "MixDivergence": "pytest_roseinfer.engines.run",
    "Oracle": "pytest_roseinfer.model",
    "RequestMix": "pytest_roseinfer.engines.mix",
    "Sampling": "pytest_roseinfer.engines.mix",
    "conformance": "pytest_roseinfer.checks",
    "run_forks": "pytest_roseinfer.engines.run",
    "run_history": "pytest_roseinfer.machine",
    "run_mix": "pytest_roseinfer.engines.run",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pytest_roseinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
