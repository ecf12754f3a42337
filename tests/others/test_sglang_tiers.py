"""SGLang's hierarchical cache: conformance, and what its adapter finds when copies go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import Divergence, conformance, settings
from tests.others.fetch import FOLDER
from tests.others.sglang_tiers import (
    Copies,
    SelectiveSglangAdapter,
    TieredSglangAdapter,
    WriteBackSglangAdapter,
)

if TYPE_CHECKING:
    from pytest_roseinfer import CacheSpec

SOURCES = FOLDER / "sglang"
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not SOURCES.exists(), reason="SGLang is not downloaded: python -m tests.others.fetch sglang"
    ),
]


@pytest.fixture(autouse=True)
def import_path(seeded_search: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    settings.set_current(replace(settings.current(), examples=150))
    monkeypatch.syspath_prepend(SOURCES)


class _EarlyCopies(Copies):
    """Says that a store has ended when it begins, and copies it when the next one begins."""

    def submit_device_to_host(self, transfers: list[Any]) -> Any:
        for copy in self.copies:
            copy.move()
        self.copies.clear()
        completion = super().submit_device_to_host(transfers)
        completion.finish_event.record()
        return completion


class _EndsStoresEarly(TieredSglangAdapter):
    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.tree.cache_controller.l2_transfer_engine = _EarlyCopies(self.store, self.lower)


class _LoadsInReverse(TieredSglangAdapter):
    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        controller, load = self.tree.cache_controller, self.tree.cache_controller.load

        def reversed_load(host_indices: Any, **arguments: Any) -> Any:
            return load(host_indices=host_indices.flip(0), **arguments)

        controller.load = reversed_load


class _UnlocksUnderAStore(TieredSglangAdapter):
    def _poll(self) -> None:
        super()._poll()
        ongoing = self.tree.ongoing_write_through
        for ack, (node, lock, publish) in [*ongoing.items()]:
            if lock is not None:
                self.tree.dec_lock_ref(node, lock)
                ongoing[ack] = type(ongoing[ack])(node, None, publish)


@pytest.mark.parametrize(
    "adapter", [TieredSglangAdapter, SelectiveSglangAdapter, WriteBackSglangAdapter]
)
def test_hierarchical_cache_conforms(adapter: type[TieredSglangAdapter]) -> None:
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_one_batch_equals_its_split_in_two()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (_EndsStoresEarly, r"match_tiers\(\) of text .* are stored in any tier"),
        (_LoadsInReverse, "expected text"),
        (_UnlocksUnderAStore, "counts . free blocks|in flight"),
    ],
)
def test_wrong_copies_are_found(adapter: type[TieredSglangAdapter], message: str) -> None:
    with pytest.raises(Divergence, match=message):
        conformance(adapter)().test_histories()
