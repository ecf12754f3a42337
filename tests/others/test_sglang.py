"""SGLang's radix cache: conformance, and the findings of docs/findings."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, conformance, settings
from pytest_roseinfer.targets import partial_import
from pytest_roseinfer.targets.sglang_radix import (
    HybridSglangAdapter,
    SglangAdapter,
    SlidingSglangAdapter,
)
from tests.others.fetch import FOLDER
from tests.others.pictures import DecodesReasoning, strip_thinking_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

SOURCES = FOLDER / "sglang"

# SGLang's imports emit warnings.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_sglang = pytest.mark.skipif(
    not SOURCES.exists(), reason="SGLang is not downloaded: python -m tests.others.fetch sglang"
)


@pytest.fixture(autouse=True)
def import_path(seeded_search: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    settings.set_current(replace(settings.current(), examples=150))
    monkeypatch.syspath_prepend(SOURCES)


class InsertsAtOnce(SglangAdapter):
    """Inserts decoded tokens into the tree as they are stored: lookups must find all of them."""

    prefixes = SglangAdapter.prefixes.but(finds="all")

    def kind(self, spec: CacheSpec) -> dict[str, Any]:
        return {**super().kind(spec), "eviction_policy": "slru"}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        for request in (self.requests[seq] for seq in seqs):
            request.refresh_fill_ids()
            self.tree.checkpoint(request, up_to=request.kv.kv_committed_len)


class EvictsWindowsEarly(SlidingSglangAdapter):
    """Evicts a page of a window while the next token still attends to it."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for request in (self.requests[seq] for seq in seqs if seq in self.requests):
            self.tree.evict_sliding_windows(request, request.kv.kv_committed_len + 1)
        super().append(seqs, key, value)


class CopiesNoStates(HybridSglangAdapter):
    """Stores a slot for the state of a prompt in the tree, and copies nothing there."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.rows.mamba_pool.copy_from = lambda *_: None


class ClearsNoStates(HybridSglangAdapter):
    """Begins a request in the state of the slot's former one."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.rows.mamba_pool.clear_slots = lambda *_: None


@needs_sglang
@pytest.mark.parametrize(
    "adapter", [SglangAdapter, InsertsAtOnce, SlidingSglangAdapter, HybridSglangAdapter]
)
def test_radix_cache_conforms(adapter: type[SglangAdapter]) -> None:
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    tests.test_every_option_ends_in_the_same_bits()


@needs_sglang
def test_window_evicted_early_is_found() -> None:
    with pytest.raises(Divergence, match=r"tokens in a window have the slots \[0"):
        conformance(EvictsWindowsEarly)().test_histories()


@needs_sglang
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (CopiesNoStates, r"\d+ tokens have the states after \[0\] tokens"),
        (ClearsNoStates, r"0 tokens have the states after \[\d+\] tokens"),
    ],
)
def test_wrong_states_are_found(adapter: type[HybridSglangAdapter], message: str) -> None:
    with pytest.raises(Divergence, match=message):
        conformance(adapter)().test_histories()


@needs_sglang
def test_stripping_reasoning_after_a_retraction_corrupts_the_ledger() -> None:
    messages = "the free list names a block twice|AssertionError: req.kv.cache_protected_len"
    with strip_thinking_cache(), pytest.raises(Divergence, match=messages):
        conformance(DecodesReasoning)().test_histories()


def test_missing_package_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(partial_import, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"sglang is not installed: unpack its wheel"):
        SglangAdapter().make(CacheSpec())
