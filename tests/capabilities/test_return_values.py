"""Return values of the wrong type or shape fail in one sentence, before they cause other errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pytest_roseinfer import (
    BadCall,
    CacheSpec,
    Divergence,
    History,
    KVCacheAdapter,
    Ledger,
    run_history,
)
from pytest_roseinfer.capabilities import return_values
from pytest_roseinfer.capabilities.writes import Append, Fill, Reserve
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.oracle.texts import Branch

KEYS = torch.zeros(1, 1, 4)
ELSEWHERE = torch.empty(1, 1, 4, device="meta")
LIST = "return a list of block numbers"
BOTH = "return keys and values, two tensors"
HOLDERS = "map each block that is held to the number of its holders"


def _what(
    base: type[KVCacheAdapter], method: str, value: object, texts: tuple[Branch, ...] = ()
) -> str:
    """Return the failure of a cache one of whose methods always returns the same value."""
    cache = type("Wrong", (base,), {method: lambda *_: value})
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(CacheSpec(), (Append((0, 1)), Append((0,))), texts=texts))
    assert str(failure.value)
    return failure.value.summary


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("table", None, f"table(0, 0) returned None: {LIST}"),
        ("table", [0.5], f"table(0, 0) returned [0.5]: {LIST}"),
        ("table", "01", f"table(0, 0) returned '01': {LIST}"),
        ("table", torch.tensor([1]), f"table(0, 0) returned a tensor of shape [1]: {LIST}"),
        ("ledger", {"free": []}, "ledger(0) returned {'free': []}: return a Ledger"),
        (
            "ledger",
            Ledger({"a": 1}, [], 8),  # type: ignore[dict-item]
            f"ledger(0) returned a Ledger whose refcounts are {{'a': 1}}: {HOLDERS}",
        ),
        (
            "ledger",
            Ledger({}, None, 8),  # type: ignore[arg-type]
            "ledger(0) returned a Ledger whose free is None: list block numbers",
        ),
        (
            "ledger",
            Ledger({}, [], None),  # type: ignore[arg-type]
            "ledger(0) returned a Ledger whose total is None: a number of blocks",
        ),
        (
            "ledger",
            Ledger({}, [], 8, num_free=0.5),  # type: ignore[arg-type]
            "ledger(0) returned a Ledger whose num_free is 0.5: a number of blocks",
        ),
        ("gather", None, f"gather(0, 0) returned None: {BOTH}"),
        ("peek", KEYS, f"peek(0, 0) returned a tensor of shape [1, 1, 4]: {BOTH}"),
        (
            "peek",
            (KEYS, [1]),
            f"peek(0, 0) returned a tuple of a tensor of shape [1, 1, 4], [1]: {BOTH}",
        ),
        (
            "peek",
            (ELSEWHERE, ELSEWHERE),
            "peek: sequence 0, layer 0, K: expected cpu, found meta",
        ),
        (
            "peek",
            (KEYS[:0], KEYS[:0]),
            "peek: sequence 0, layer 0, K: expected shape [1, 1, 4], found [0, 1, 4]",
        ),
        ("arena", None, f"arena() returned None: {BOTH}"),
        (
            "arena",
            (KEYS, KEYS),
            "arena() returned a tuple of a tensor of shape [1, 1, 4], a tensor of shape [1, 1, 4]: "
            "return views of 5 dimensions",
        ),
        ("attend", None, "attend([0, 1], query, 0) returned None: return a tensor like the query"),
        (
            "path_counts",
            None,
            "path_counts() returned None: return a mapping of names to how often each was counted",
        ),
    ],
)
def test_wrong_return_value_fails_with_its_rule(method: str, value: object, message: str) -> None:
    assert _what(PagedCache, method, value) == message


class BlocksBeforeHeads(PagedCache):
    """Returns [layers, blocks, block_size, heads, head_dim], two dimensions in the wrong order."""

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().arena()
        return keys.transpose(2, 3), values.transpose(2, 3)


class ShowsACopy(PagedCache):
    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().arena()
        return keys.clone(), values.clone()


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            BlocksBeforeHeads,
            "arena() returned a tensor of shape [1, 8, 4, 1, 4]: return views "
            "[layers=1, blocks, heads=1, block_size=4, head_dim=4]",
        ),
        (
            ShowsACopy,
            "arena() returned a new copy each time: return views of the tensors that the cache "
            "itself writes to, whose free blocks the harness poisons",
        ),
    ],
)
def test_arena_that_is_no_view_fails_at_once(cache: type[KVCacheAdapter], message: str) -> None:
    with pytest.raises(Divergence) as failure:
        run_history(cache, History(CacheSpec(), (Append((0,)),)))
    assert failure.value.summary == message


def test_ledger_of_iterators_is_refused() -> None:
    once: Any = reversed([1, 2])
    with pytest.raises(TypeError, match=r"whose free is <list_reverseiterator .*>: list block n"):
        return_values.ledger("ledger(0)", Ledger({}, once, 8))
    assert [*once] == [2, 1]


class TableLostAfterAnError(PagedCache):
    """A cache that has no table once it has raised an error."""

    table_lost = False

    def table(self, seq: int, layer: int) -> Any:
        return None if self.table_lost else super().table(seq, layer)

    def _lose_table(self) -> None:
        self.table_lost = True
        raise IndexError("pop from empty list")


class LosesItsTableInABadCall(TableLostAfterAnError):
    def bad_calls(self) -> Iterator[BadCall]:
        yield BadCall("free of nothing", self._lose_table, (IndexError,))


class LosesItsTableInAWrite(TableLostAfterAnError):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if self.lengths:
            self._lose_table()
        super().append(seqs, key, value)


def test_wrong_value_after_a_bad_call_names_the_call() -> None:
    with pytest.raises(Divergence) as failure:
        run_history(LosesItsTableInABadCall, History(CacheSpec(), (Append((0,)),)))
    assert failure.value.summary == f"after free of nothing, table(0, 0) returned None: {LIST}"


def test_error_of_a_write_is_reported_before_later_wrong_values() -> None:
    with pytest.raises(Divergence, match="the write raised IndexError: pop from empty list"):
        run_history(LosesItsTableInAWrite, History(CacheSpec(), (Append((0,)), Append((0,)))))


def test_lookup_that_returns_no_count_fails() -> None:
    message = _what(TextCache, "match_prefix", None, texts=((0, 0), (0, 0)))
    assert message == "match_prefix([1, 1]) returned None: return a number of tokens"


class Reserves(ListCache):
    """A cache whose reservation is the list of rows that ``fill`` needs, if it is returned."""

    returns = True

    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> object:
        rows = [seq for seq, count in zip(seqs, counts, strict=True) for _ in range(count)]
        return rows if self.returns else None

    def fill(self, reservation: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append([*reservation], key, value)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq in self.rows:
            return super().peek(seq, layer)
        return KEYS[:, :0], KEYS[:, :0]


def test_reservation_that_is_not_returned_fails() -> None:
    history = History(CacheSpec(), (Append((0,)), Reserve((0,), (3,)), Fill()))
    run_history(Reserves, history)
    cache = type("Forgets", (Reserves,), {"returns": False})
    with pytest.raises(Divergence) as failure:
        run_history(cache, history)
    assert failure.value.summary.startswith(
        "reserve() returned None, and fill(None, key, value) raised"
    )
    assert failure.value.summary.endswith(": return the handle that fill needs from reserve")
    assert isinstance(failure.value.__cause__, TypeError)


def test_long_return_value_is_shortened_to_one_line() -> None:
    with pytest.raises(TypeError, match=r"^table\(\) returned {.{79}\.\.\.: return") as failure:
        return_values.table("table()", {at: np.zeros((2, 2)) for at in range(9)})
    assert "\n" not in str(failure.value)


def test_equivalent_return_values_are_converted() -> None:
    numbers = (np.int64(3), None)
    assert return_values.table("table()", numbers) == [3, None]
    keys, values = return_values.pair("peek()", torch.stack([KEYS, KEYS + 1]))
    assert (keys.shape, values.shape) == (KEYS.shape, KEYS.shape)
    assert return_values.count("match_prefix()", np.int32(2)) == 2


class AttendsElsewhere(PagedCache):
    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:  # noqa: ARG002
        return query.to("meta")


def test_attention_on_another_device_fails() -> None:
    with pytest.raises(Divergence, match="attend: expected cpu, found meta"):
        run_history(AttendsElsewhere, History(CacheSpec(), (Append((0,)),)))
