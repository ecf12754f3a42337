"""Lists the histories that do the same to a plainer or smaller cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.search.smaller_steps import more_usual, smaller_numbers, with_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
    from pytest_roseinfer.cases.history import History

_FEWEST_BLOCKS = 2


def smaller_caches(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    spec = history.spec
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    for options in more_usual(spec.options, usual):
        yield _with(history, options=options)
    if not history.finite:
        yield replace(history, finite=True)
    if history.gathers_every > 1:
        yield replace(history, gathers_every=1)
    yield from (replace(history, texts=history.texts[:few]) for few in range(1, len(history.texts)))
    yield from (_with(history, **layers) for layers in _fewer_layers(spec))
    yield from (_with(history, windows=windows) for windows in _smaller_windows(spec))
    for name, sizes in _shapes(adapter).items():
        now = getattr(spec, name)
        yield from (_with(history, **{name: size}) for size in sorted(sizes) if size < now)
    if spec.dtype != adapter.dtypes[0]:
        yield _with(history, dtype=adapter.dtypes[0])
    for size in sorted(adapter.block_sizes):
        if size < spec.block_size:
            yield _with_blocks_of(size, history)
            yield _with(history, block_size=size)
    for blocks in smaller_numbers(spec.num_blocks, fewest_blocks(spec)):
        yield _with(history, num_blocks=blocks)


def fewest_blocks(spec: CacheSpec) -> int:
    return _FEWEST_BLOCKS * max(1, len({*spec.windows}))


def _with(history: History, **fields: Any) -> History:
    return replace(history, spec=replace(history.spec, **fields))


def _shapes(adapter: type[KVCacheAdapter]) -> dict[str, Any]:
    return {"num_heads": adapter.head_counts, "head_dim": adapter.head_dims}


def _fewer_layers(spec: CacheSpec) -> Iterator[dict[str, Any]]:
    for layers in range(1, spec.num_layers):
        if not spec.windows:
            yield {"num_layers": layers}
        for begin in {0, spec.num_layers - layers} if spec.windows else ():
            yield {"num_layers": layers, "windows": spec.windows[begin : begin + layers]}


def _smaller_windows(spec: CacheSpec) -> Iterator[tuple[int | None, ...]]:
    for window in {*spec.windows} - {None}:
        for smaller in smaller_numbers(window or 0, 1):
            yield tuple(smaller if each == window else each for each in spec.windows)


def _with_blocks_of(size: int, history: History) -> History:
    """Make the blocks smaller, and all numbers so that they end where they did in a block."""
    change = partial(_as_many_blocks, history.spec.block_size, size)
    steps = tuple(with_numbers(step, change) for step in history.operations)
    return replace(_with(history, block_size=size), operations=steps)


def _as_many_blocks(old: int, new: int, tokens: int) -> int:
    """Return a number of tokens that fills as many blocks, and as much of the last as can be."""
    blocks, rest = divmod(tokens, old)
    last = new - 1 if rest == old - 1 else min(rest, new - 1)
    return blocks * new + (max(1, last) if rest else 0)
