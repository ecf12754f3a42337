"""Slow first calls, made once before forking, which saves half a second for every process."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import hypothesis
import pytest  # noqa: F401  (conformance tests skip with it)
import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401  (engines under test run them)
import triton
import triton.experimental.gluon
import triton.language as tl

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.suite.conformance import conformance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec


def warm_up() -> None:
    """Import and run everything outside of the package under test."""
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("roseinfer_mutants", database=None)
    hypothesis.settings.load_profile("roseinfer_mutants")
    numbers = torch.arange(4)
    _increment[(1,)](numbers, 4)
    if numbers.tolist() != [1, 2, 3, 4]:
        raise RuntimeError("Triton's interpreter is off, or wrong")
    settings.set_current(settings.Settings(examples=20, seed=0))
    conformance(_Rows)().test_histories()
    gc.collect()
    gc.freeze()


@triton.jit  # type: ignore[untyped-decorator]
def _increment(numbers, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = numbers + tl.arange(0, SIZE)
    tl.store(at, tl.load(at) + 1)


class _Rows(KVCacheAdapter):
    """Right and slow cache of lists."""

    def make(self, spec: CacheSpec) -> None:
        self.dtype = getattr(torch, spec.dtype)
        self.rows: dict[int, list[torch.Tensor]] = {}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for row, seq in enumerate(seqs):
            both = torch.stack([key[:, row], value[:, row]]).to(self.dtype)
            self.rows.setdefault(seq, []).append(both)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack(self.rows[seq], dim=2)
        return both[0, layer], both[1, layer]
