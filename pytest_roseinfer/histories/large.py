"""Large histories: batches of many rows, and long sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.capability import Large
from pytest_roseinfer.capabilities.device_queue import Read
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.text_keys import keys_by_part
from pytest_roseinfer.capabilities.writes import (
    ONE_BY_ONE,
    Append,
    AppendPadded,
    written,
)
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.oracle.texts import duplicate_in_namespaces, repeat_with_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch

ROWS = (9, 17, 33, 65)
"""Rows of batches: one more than the rows that a kernel program often processes."""
SEQUENCES = 71
"""Most sequences at a time of the history with most steps, unless the cache has a lower limit."""
MOST_ROWS = 130
"""Rows of the widest batches: more than the 128 that many kernels and buffers have room for."""
_BLOCKS = 66
_TOKENS = 513
_FEW_TOKENS = 257
_MAX_TOKENS = 2200
"""Most tokens of a table of 66 blocks; larger blocks get a shorter table."""
_SMALL_HEAD = 4
_SMALL_BLOCK = 2


def large_histories(
    adapter: type[KVCacheAdapter], options: Mapping[str, Any], device: str
) -> Iterator[History]:
    """Yield the large histories for a cache with these switches, of operations that it offers."""
    size = min(adapter.block_sizes, key=lambda each: (each < _SMALL_BLOCK, abs(each - 4), each))
    histories = [_many_rows(adapter, size), _long_sequences(adapter, size)]
    if not adapter.max_sequences or adapter.max_sequences > SEQUENCES:
        histories.append(_most_rows(adapter))
    for steps in histories:
        able = tuple(step for step in steps if step.needs <= adapter.abilities)
        spec = _spec(adapter, size, able, options, device)
        yield History(spec, able, texts=_texts(adapter, size))


def _many_rows(adapter: type[KVCacheAdapter], size: int) -> Iterator[Operation]:
    """Append to 9, 17, 33 and 65 rows; then apply each operation that the cache offers to all rows.

    At the end, the names of freed sequences are used again.
    """
    max_sequences = adapter.max_sequences or SEQUENCES
    for rows in ROWS:
        yield Append(tuple(range(min(rows, max_sequences))))
    yield Read()
    large = Large(adapter, size, list(range(min(ROWS[-1], max_sequences))), max_sequences)
    for capability in adapter.capabilities:
        if capability.large:
            yield from capability.large(large)
            yield Read()
    free_names = (seq for seq in range(min(ROWS[-1], max_sequences)) if seq not in large.names)
    yield Append((*large.names[1:], *free_names))


def _most_rows(adapter: type[KVCacheAdapter]) -> Iterator[Operation]:
    """Append to batches of 100 and 130 rows, in few steps, since each sequence is read after each.

    Some rows begin a block, some share one with a fork, and the others write to their own.
    """
    rows = min(MOST_ROWS, adapter.max_sequences or MOST_ROWS)
    names = range(rows - 1)
    yield Append(tuple(names[:-30]))
    yield Append(tuple(names))
    yield Fork(1, rows - 1)
    yield Append((rows - 1, *names[1:], 0))
    yield AppendPadded((*names[:100], None, *names[100:]))


def _long_sequences(adapter: type[KVCacheAdapter], size: int) -> Iterator[Operation]:
    """Write some hundred tokens at once, then one by one; a fork copies a block of a long table."""
    long = _BLOCKS * size if _BLOCKS * size <= _MAX_TOKENS else _TOKENS
    begun = {0: _FEW_TOKENS, 1: max(long, _TOKENS) - 1}
    if max_tokens := adapter.max_tokens:
        begun = {seq: min(count, max_tokens - ONE_BY_ONE) for seq, count in begun.items()}
    yield from written(begun, adapter.abilities)
    yield Append((0, 1))
    yield Read()
    yield Append((1, 0))
    yield Fork(1, 2)
    yield Append((2, 1))
    yield Append((1, 0, 2))
    yield Free(1)
    yield Append((0, 2, 3))
    yield Append((2, 3))


def _spec(
    adapter: type[KVCacheAdapter],
    size: int,
    steps: Sequence[Operation],
    options: Mapping[str, Any],
    device: str,
) -> CacheSpec:
    """Make the spec of a cache with few heads, and with room for all steps."""
    heads = [each for each in adapter.head_dims if each >= _SMALL_HEAD] or adapter.head_dims
    windows = adapter.windows.choose((5 * size, None))
    pools = len(windows) if adapter.windows.pools == "shared" and windows else 1
    return CacheSpec(
        num_layers=max(1, len(windows)),
        num_heads=min(adapter.head_counts),
        head_dim=min(heads),
        block_size=size,
        num_blocks=pools * _max_blocks(size, steps, adapter.lookahead_blocks),
        dtype=adapter.dtypes[0],
        device=device,
        options=options,
        windows=windows,
    )


def _max_blocks(size: int, steps: Sequence[Operation], lookahead_blocks: int) -> int:
    """Count the blocks that steps need if none is shared or freed."""
    lengths: dict[int, int] = {}
    for step in steps:
        if isinstance(step, Fork):
            lengths[step.child] = lengths.get(step.parent, 0)
        for seq, count in step.rows():
            lengths[seq] = lengths.get(seq, 0) + count
    return sum(length // size + 2 + lookahead_blocks for length in lengths.values())


def _texts(adapter: type[KVCacheAdapter], size: int) -> tuple[Branch, ...]:
    """Return three texts, two of them with a common prefix; none without ``use_tokens``.

    A cache with namespaces gets each text in two, and one with parts of keys gets it with two keys.
    """
    if "use_tokens" not in adapter.abilities:
        return ()
    texts = ((0, 0), (0, size + 1), (0, 0))
    if adapter.key_parts:
        usual, *_, other = keys_by_part(adapter.key_parts, size - 1, 2 * size)
        return repeat_with_keys(texts, (usual, other))
    return duplicate_in_namespaces(texts) if "use_namespaces" in adapter.abilities else texts
