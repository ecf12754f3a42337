"""Large histories: many rows, long sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.device_queue import Read
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import (
    Append,
    AppendMany,
    AppendPadded,
    Fill,
    Prefill,
    Reserve,
)
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.oracle.texts import in_two_namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch

ROWS = (9, 17, 33, 65)
"""One more than what a program often takes."""
SEQUENCES = 71
"""The most that there are at a time, unless the cache holds fewer."""
_ONE_BY_ONE = 8
"""No sequence gets more tokens in steps that bring one."""
_BLOCKS = 66
_TOKENS = 513
_FEW_TOKENS = 257
_MOST_TOKENS = 2200
"""Where blocks are so large that 66 of them hold more, the table is shorter."""
_SMALL_HEAD = 4
_SMALL_BLOCK = 2
_PAIRS = ((2, 65), (20, 66), (40, 67), (0, 68))
"""Parents and their forks; of blocks of 4 tokens, those of 20 and 40 are partial."""


def large_histories(
    adapter: type[KVCacheAdapter], options: Mapping[str, Any], device: str
) -> Iterator[History]:
    """Yield them for a cache with these switches, with the operations that it offers."""
    size = min(adapter.block_sizes, key=lambda each: (each < _SMALL_BLOCK, abs(each - 4), each))
    for steps in (_many_rows(adapter, size), _long_sequences(adapter, size)):
        able = tuple(step for step in steps if step.needs <= adapter.abilities)
        spec = _spec(adapter, size, able, options, device)
        yield History(spec, able, texts=_texts(adapter, size))


def _many_rows(adapter: type[KVCacheAdapter], size: int) -> Iterator[Operation]:
    """Append to 9, 17, 33 and 65, of different lengths then; the last rows are of every kind."""
    most = adapter.most_sequences or SEQUENCES
    for rows in ROWS:
        yield Append(tuple(range(min(rows, most))))
    yield Read()
    for parent, child in _PAIRS:
        if child < most:
            yield Fork(parent, child)
    last = tuple(seq for seq in (20, 66, 2, 65, 0, 40, 67, 68, 1, 10, 69) if seq < most)
    others = tuple(seq for seq in reversed(range(min(65, most))) if seq not in last)
    names = (*others, *last)
    yield Append(names)
    yield Read()
    counts = _counts(len(names), size, adapter.most_tokens)
    yield AppendMany(names[::-1], counts)
    yield AppendPadded((*names[:40], None, *names[40:], None))
    yield Reserve(names, counts[::-1])
    yield Fill()
    yield Free(names[len(names) // 2])
    yield Append(names[:-1])
    yield Append((*others, *(seq for seq in (69, 70) if seq < most)))


def _counts(rows: int, size: int, most_tokens: int | None) -> tuple[int, ...]:
    """Return a number of tokens for each row, up to a block and one, which it can get twice."""
    most = size + 1 if most_tokens is None else min(size + 1, (most_tokens - _ONE_BY_ONE) // 2)
    return tuple(1 + at % most for at in range(rows))


def _long_sequences(adapter: type[KVCacheAdapter], size: int) -> Iterator[Operation]:
    """Write some hundred tokens at once, then one by one; a fork copies a block far behind."""
    long = _BLOCKS * size if _BLOCKS * size <= _MOST_TOKENS else _TOKENS
    begun = {0: _FEW_TOKENS, 1: max(long, _TOKENS) - 1}
    if most := adapter.most_tokens:
        begun = {seq: min(count, most - _ONE_BY_ONE) for seq, count in begun.items()}
    yield from _written(begun, adapter.abilities)
    yield Append((0, 1))
    yield Read()
    yield Append((1, 0))
    yield Fork(1, 2)
    yield Append((2, 1))
    yield Append((1, 0, 2))
    yield Free(1)
    yield Append((0, 2, 3))
    yield Append((2, 3))


def _written(counts: Mapping[int, int], can: frozenset[str]) -> Iterator[Operation]:
    """Begin sequences with so many tokens, in as few steps as there can be."""
    if "prefill" in can:
        yield from (Prefill(seq, count) for seq, count in counts.items())
    elif "append_many" in can:
        yield AppendMany(tuple(counts), tuple(counts.values()))
    elif {"reserve", "fill"} <= can:
        yield Reserve(tuple(counts), tuple(counts.values()))
        yield Fill()
    else:
        for done in range(max(counts.values())):
            yield Append(tuple(seq for seq, count in counts.items() if done < count))


def _spec(
    adapter: type[KVCacheAdapter],
    size: int,
    steps: Sequence[Operation],
    options: Mapping[str, Any],
    device: str,
) -> CacheSpec:
    """Make a cache with few heads, in which all steps find room."""
    heads = [each for each in adapter.head_dims if each >= _SMALL_HEAD] or adapter.head_dims
    windows = (None, 5 * size)[: adapter.window_groups]
    pools = len(windows) if adapter.window_pools == "shared" and windows else 1
    return CacheSpec(
        num_layers=max(1, len(windows)),
        num_heads=min(adapter.head_counts),
        head_dim=min(heads),
        block_size=size,
        num_blocks=pools * _most_blocks(size, steps),
        dtype=adapter.dtypes[0],
        device=device,
        options=options,
        windows=windows,
    )


def _most_blocks(size: int, steps: Sequence[Operation]) -> int:
    """Count the blocks that steps take if nothing is shared or given back."""
    lengths: dict[int, int] = {}
    for step in steps:
        if isinstance(step, Fork):
            lengths[step.child] = lengths.get(step.parent, 0)
        for seq, count in step.rows():
            lengths[seq] = lengths.get(seq, 0) + count
    return sum(length // size + 2 for length in lengths.values())


def _texts(adapter: type[KVCacheAdapter], size: int) -> tuple[Branch, ...]:
    """Have sequences say three texts, of which two begin alike, where the cache is told."""
    if "texts" not in adapter.abilities:
        return ()
    texts = ((0, 0), (0, size + 1), (0, 0))
    return in_two_namespaces(texts) if "namespaces" in adapter.abilities else texts
