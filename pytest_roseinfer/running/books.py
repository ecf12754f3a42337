"""Asks a cache for its books, and copies what it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.answers import checked
from pytest_roseinfer.cases.operations.operation import asked
from pytest_roseinfer.findings.observation import Snapshot

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.cache import KVCacheAdapter, Ledger
    from pytest_roseinfer.oracle.oracle import Oracle

BOOKS = frozenset({"table", "ledger", "kept_in"})
"""The methods that show a part of them."""


def books_of(adapter: KVCacheAdapter, oracle: Oracle, num_layers: int) -> Snapshot:
    can, layers = adapter.abilities, range(num_layers)
    tables, ledgers = None, []
    if "table" in can:
        tables = {
            (seq, layer): asked(_table, adapter, seq, layer)
            for layer in layers
            for seq in oracle.sequences
        }
    if "ledger" in can:
        ledgers = [asked(_copied, adapter, layer) for layer in layers]
    kept = {}
    if "kept_in" in can:
        kept = {seq: asked(adapter.kept_in, seq) for seq in oracle.readable}
    return Snapshot(tables=tables, kept=kept, ledgers=ledgers)


def _table(adapter: KVCacheAdapter, seq: int, layer: int) -> list[int | None]:
    return checked.table(f"table({seq}, {layer})", adapter.table(seq, layer))


def _copied(adapter: KVCacheAdapter, layer: int) -> Ledger:
    shown = checked.ledger(f"ledger({layer})", adapter.ledger(layer))
    return replace(
        shown,
        refcounts=dict(shown.refcounts),
        free=list(shown.free),
        cached=set(shown.cached),
    )
