"""Opens what kernels of all ranks add up rows through."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.sums.exchange import Exchange
from roseinfer.kv.lasting import lasting
from roseinfer.ranks.inboxes import open_inboxes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.ranks.ranks import Ranks

_MOST_SENT = 4 << 20
"""A GPU sends at most so many bytes in one sum. In larger ones all rows would go to every rank,
where the ranks' own sum sends each a part of them."""
_ROWS_ON_CPU = 64


def open_exchange(ranks: Ranks, width: int, dtype: torch.dtype) -> Exchange | None:
    """Return what rows of a width are added up through; None where ranks cannot share memory.

    All ranks call this together. When one of them ends, kernels of this one wait no more.
    """
    together = 2 if dtype.itemsize == 2 and width % 2 == 0 else 1
    words = width // together
    most_rows = ranks.least(_most_rows(ranks, words))
    if most_rows < 1:
        return None
    inboxes = open_inboxes(ranks, 2 * ranks.size * most_rows * words)
    if inboxes is None:
        return None
    device = ranks.device
    with lasting():
        exchange = Exchange(
            rank=ranks.rank,
            ranks=ranks.size,
            together=together,
            most_rows=most_rows,
            inbox=inboxes.own.view(2, ranks.size, most_rows, words),
            inboxes=torch.tensor(inboxes.addresses, dtype=torch.int64, device=device),
            rounds=torch.zeros(most_rows, dtype=torch.int32, device=device),
            gone=torch.zeros(1, dtype=torch.int32, device=device),
        )
        ranks.on_abort.append(_ender(exchange.gone))
    return exchange


def _most_rows(ranks: Ranks, words: int) -> int:
    """Return how many rows of so many words may be added up at once.

    A row has a program, and all of them must be running: each multiprocessor has room for one.
    """
    room = _MOST_SENT // (8 * words * (ranks.size - 1))
    if ranks.device.type != "cuda":
        return min(room, _ROWS_ON_CPU)
    device = torch.cuda.get_device_properties(ranks.device)
    return min(room, int(device.multi_processor_count))


def _ender(gone: Tensor) -> Callable[[], None]:
    """Return what tells kernels that run to wait no more. It may be called in any thread."""
    if gone.device.type != "cuda":
        return partial(gone.fill_, 1)  # type: ignore[return-value]
    told = torch.ones(1, dtype=torch.int32, pin_memory=True)
    stream = torch.cuda.Stream(gone.device)  # type: ignore[no-untyped-call]

    def end() -> None:
        # A kernel that waits holds up what is behind it in its own stream, but no copy in this one.
        with torch.cuda.stream(stream), torch.inference_mode(False):
            gone.copy_(told, non_blocking=True)

    return end
