"""Memory of each rank that all ranks of a host can write to."""

from __future__ import annotations

import ctypes
import logging
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from roseinfer.kernels.cuda.toolchain import check, driver
from roseinfer.kernels.exchange import Exchange
from roseinfer.kv.transfers import lasting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.distributed.ranks import Ranks

_LOG = logging.getLogger("roseinfer")
_PAGE = 2 << 20
"""A GPU's memory is handed to other processes in pieces of so many bytes."""
_HANDLE_BYTES = 64
_LAZILY = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the GPU of this process reads and writes another's."""
_LONGEST_PATH = 256


class Inboxes(NamedTuple):
    """What one rank has of the memory of all."""

    own: Tensor
    """64-bit words of this rank's memory, which others write to."""
    addresses: list[int]
    """Where this process finds the memory of each rank."""


def open_inboxes(ranks: Ranks, words: int) -> Inboxes | None:
    """Give each rank so many words, all 0; None where some rank cannot write to all others.

    All ranks call this together, and get the same answer.
    """
    with lasting():
        found = _on_gpus(ranks, words) if ranks.device.type == "cuda" else _in_file(ranks, words)
        if found is None or not _arrives(ranks, found):
            return None
        found.own.zero_()
        ranks.least(0)  # nobody is sent anything before all have zeros
        return found


class _Handle(ctypes.Structure):
    """What another process opens memory by."""

    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class _Words:
    """Memory as torch takes it from others.

    It is given back when the process ends: another process may have it open until then.
    """

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (words,),
            "typestr": "<i8",
            "version": 3,
        }


def _on_gpus(ranks: Ranks, words: int) -> Inboxes | None:
    with torch.cuda.device(ranks.device):
        own, handle = 0, _Handle()
        try:
            own = _allocated(words, handle)
        except RuntimeError as error:
            _say_why(error)
        sent = torch.frombuffer(bytearray(handle), dtype=torch.uint8)[None].to(ranks.device)
        handles = ranks.gather(sent).view(ranks.size, _HANDLE_BYTES).cpu()
        addresses: list[int] = []
        if ranks.least(int(own != 0)):
            try:
                addresses = [
                    own if rank == ranks.rank else _opened(bytes(each.tolist()), rank)
                    for rank, each in enumerate(handles)
                ]
            except RuntimeError as error:
                _say_why(error)
        if not ranks.least(len(addresses)):
            return None
        return Inboxes(torch.as_tensor(_Words(own, words), device=ranks.device), addresses)


def _allocated(words: int, handle: _Handle) -> int:
    """Return the address of new memory of the current GPU, and fill in its handle."""
    torch.cuda.synchronize()  # what torch computes on is the driver's current context by now
    address = ctypes.c_ulonglong()
    size = -(-8 * words // _PAGE) * _PAGE
    check(driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    check(driver().cuIpcGetMemHandle(ctypes.byref(handle), address))
    return address.value


def _opened(handle: bytes, rank: int) -> int:
    """Return where the current GPU finds the memory of another rank."""
    here = torch.cuda.current_device()
    if not torch.cuda.can_device_access_peer(here, rank):
        raise RuntimeError(f"GPU {here} cannot access the memory of GPU {rank}")
    given, address = _Handle.from_buffer_copy(handle), ctypes.c_ulonglong()
    open_memory: Any = driver().cuIpcOpenMemHandle_v2
    check(open_memory(ctypes.byref(address), given, ctypes.c_uint(_LAZILY)))
    return address.value


def _in_file(ranks: Ranks, words: int) -> Inboxes:
    """Give ranks without GPUs memory that they share."""
    path = torch.zeros(_LONGEST_PATH, dtype=torch.uint8)
    if ranks.rank == 0:
        with tempfile.NamedTemporaryFile(prefix="roseinfer-", delete=False) as file:
            file.truncate(8 * words * ranks.size)
        name = file.name.encode()
        path[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    ranks.share(path)
    name = bytes(path.tolist()).rstrip(b"\0")
    shared = torch.from_file(
        name.decode(), shared=True, size=words * ranks.size, dtype=torch.int64
    ).view(ranks.size, words)
    ranks.least(0)  # all have it open
    if ranks.rank == 0:
        Path(name.decode()).unlink()
    return Inboxes(shared[ranks.rank], [each.data_ptr() for each in shared])


def _arrives(ranks: Ranks, inboxes: Inboxes) -> bool:
    """Send every rank a word, and return True if all have come to all."""
    inboxes.own.zero_()
    _wait_for(ranks.device)
    ranks.least(0)
    sent = True
    for address in inboxes.addresses:
        try:
            _write(ranks.device, address + 8 * ranks.rank, ranks.rank + 1)
        except RuntimeError as error:
            _say_why(error)
            sent = False
    all_sent = ranks.least(int(sent))
    came = inboxes.own[: ranks.size].tolist()
    right = came == [*range(1, ranks.size + 1)]
    if all_sent and not right:
        _say_why(RuntimeError(f"of words 1 to {ranks.size} came {came}"))
    return bool(ranks.least(int(right)))


def _write(device: torch.device, address: int, word: int) -> None:
    text = word.to_bytes(8, "little")
    if device.type == "cuda":
        with torch.cuda.device(device):
            check(driver().cuMemcpyHtoD_v2(ctypes.c_ulonglong(address), text, ctypes.c_size_t(8)))
            torch.cuda.synchronize()
    else:
        ctypes.memmove(address, text, 8)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _say_why(error: Exception) -> None:
    _LOG.info("ranks share no memory: %s", error)


# Opens what kernels of all ranks add up rows through.


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
