"""Peer memory: buffers of each rank that all ranks of a host can write to."""

from __future__ import annotations

import ctypes
import logging
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from roseinfer.kernels.cuda.toolchain import check_driver_call, driver
from roseinfer.kv.transfers import outside_inference_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.distributed.ranks import Ranks
    from roseinfer.kernels.triton.all_reduce import AllReduceBuffers

_LOG = logging.getLogger("roseinfer")
_PAGE = 2 << 20
"""Granularity in bytes of GPU memory that is shared with other processes."""
_HANDLE_BYTES = 64
_LAZILY = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: lets the GPU of this process access another's memory."""
_LONGEST_PATH = 256


class PeerBuffers(NamedTuple):
    """The buffers of all ranks, as one rank sees them."""

    local: Tensor
    """Buffer of this rank, in 64-bit words, which others write to."""
    addresses: list[int]
    """Address of each rank's buffer in this process."""


def open_peer_buffers(ranks: Ranks, num_words: int) -> PeerBuffers | None:
    """Allocate zeroed buffers; return None if some rank cannot write to all others.

    Each rank's buffer has ``num_words`` 64-bit words. All ranks call this together, and all succeed
    or all get None.
    """
    with outside_inference_mode():
        on_gpu = ranks.device.type == "cuda"
        buffers = _on_gpus(ranks, num_words) if on_gpu else _in_file(ranks, num_words)
        if buffers is None or not _test_peer_writes(ranks, buffers):
            return None
        buffers.local.zero_()
        ranks.all_reduce_min(0)  # no rank writes before all buffers are zero
        return buffers


class _Handle(ctypes.Structure):
    """A handle for another process to open memory with (CUipcMemHandle)."""

    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class _Words:
    """Memory in the form that torch imports (``__cuda_array_interface__``).

    It is freed when the process ends: another process may have it open until then.
    """

    def __init__(self, address: int, num_words: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_words,),
            "typestr": "<i8",
            "version": 3,
        }


def _on_gpus(ranks: Ranks, num_words: int) -> PeerBuffers | None:
    with torch.cuda.device(ranks.device):
        local_address, handle = 0, _Handle()
        try:
            local_address = _allocate_device_memory(num_words, handle)
        except RuntimeError as error:
            _log_reason(error)
        own_handle = torch.frombuffer(bytearray(handle), dtype=torch.uint8)[None].to(ranks.device)
        handles = ranks.all_gather(own_handle).view(ranks.size, _HANDLE_BYTES).cpu()
        addresses: list[int] = []
        if ranks.all_reduce_min(int(local_address != 0)):
            try:
                addresses = [
                    local_address
                    if rank == ranks.rank
                    else _open_handle(bytes(each.tolist()), rank)
                    for rank, each in enumerate(handles)
                ]
            except RuntimeError as error:
                _log_reason(error)
        if not ranks.all_reduce_min(len(addresses)):
            return None
        return PeerBuffers(
            torch.as_tensor(_Words(local_address, num_words), device=ranks.device), addresses
        )


def _allocate_device_memory(num_words: int, handle: _Handle) -> int:
    """Allocate memory of the current GPU; return its address, and fill in its handle."""
    torch.cuda.synchronize()  # makes torch's context the driver's current one
    address = ctypes.c_ulonglong()
    size = -(-8 * num_words // _PAGE) * _PAGE
    check_driver_call(driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    check_driver_call(driver().cuIpcGetMemHandle(ctypes.byref(handle), address))
    return address.value


def _open_handle(handle: bytes, rank: int) -> int:
    """Open the memory of another rank, and return its address for the current GPU."""
    here = torch.cuda.current_device()
    if not torch.cuda.can_device_access_peer(here, rank):
        raise RuntimeError(f"GPU {here} cannot access the memory of GPU {rank}")
    peer_handle, address = _Handle.from_buffer_copy(handle), ctypes.c_ulonglong()
    open_memory: Any = driver().cuIpcOpenMemHandle_v2
    check_driver_call(open_memory(ctypes.byref(address), peer_handle, ctypes.c_uint(_LAZILY)))
    return address.value


def _in_file(ranks: Ranks, num_words: int) -> PeerBuffers:
    """Map a shared file as buffers, for ranks without GPUs."""
    path = torch.zeros(_LONGEST_PATH, dtype=torch.uint8)
    if ranks.rank == 0:
        with tempfile.NamedTemporaryFile(prefix="roseinfer-", delete=False) as file:
            file.truncate(8 * num_words * ranks.size)
        name = file.name.encode()
        path[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    ranks.broadcast(path)
    name = bytes(path.tolist()).rstrip(b"\0")
    shared = torch.from_file(
        name.decode(), shared=True, size=num_words * ranks.size, dtype=torch.int64
    ).view(ranks.size, num_words)
    ranks.all_reduce_min(0)  # all have it open
    if ranks.rank == 0:
        Path(name.decode()).unlink()
    return PeerBuffers(shared[ranks.rank], [each.data_ptr() for each in shared])


def _test_peer_writes(ranks: Ranks, inboxes: PeerBuffers) -> bool:
    """Write a word to every rank, and return True if all words have arrived at all ranks."""
    inboxes.local.zero_()
    _wait_for(ranks.device)
    ranks.all_reduce_min(0)
    sent = True
    for address in inboxes.addresses:
        try:
            _write(ranks.device, address + 8 * ranks.rank, ranks.rank + 1)
        except RuntimeError as error:
            _log_reason(error)
            sent = False
    all_sent = ranks.all_reduce_min(int(sent))
    received = inboxes.local[: ranks.size].tolist()
    all_written = received == [*range(1, ranks.size + 1)]
    if all_sent and not all_written:
        _log_reason(RuntimeError(f"expected words 1 to {ranks.size}, received {received}"))
    return bool(ranks.all_reduce_min(int(all_written)))


def _write(device: torch.device, address: int, word: int) -> None:
    text = word.to_bytes(8, "little")
    if device.type == "cuda":
        with torch.cuda.device(device):
            check_driver_call(
                driver().cuMemcpyHtoD_v2(ctypes.c_ulonglong(address), text, ctypes.c_size_t(8))
            )
            torch.cuda.synchronize()
    else:
        ctypes.memmove(address, text, 8)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _log_reason(error: Exception) -> None:
    _LOG.info("ranks: no peer memory: %s", error)


# The exchange: buffers for all-reduce inside of kernels.


_MAX_BYTES_SENT = 4 << 20
"""Most bytes that a GPU sends in one all-reduce by exchange, which sends all rows to every rank.
For larger ones NCCL's all-reduce is better: it sends each rank a part of them."""
_ROWS_ON_CPU = 64


def open_exchange(ranks: Ranks, width: int, dtype: torch.dtype) -> AllReduceBuffers | None:
    """Return an exchange for rows of ``width`` values; None if ranks cannot share memory.

    All ranks call this together. When one of them ends, kernels of this one stop waiting.
    """
    from roseinfer.kernels.triton.all_reduce import AllReduceBuffers  # imports Triton

    values_per_word = 2 if dtype.itemsize == 2 and width % 2 == 0 else 1
    num_words = width // values_per_word
    max_rows = ranks.all_reduce_min(_max_rows(ranks, num_words))
    if max_rows < 1:
        return None
    inboxes = open_peer_buffers(ranks, 2 * ranks.size * max_rows * num_words)
    if inboxes is None:
        return None
    device = ranks.device
    with outside_inference_mode():
        exchange = AllReduceBuffers(
            rank=ranks.rank,
            ranks=ranks.size,
            values_per_word=values_per_word,
            max_rows=max_rows,
            inbox=inboxes.local.view(2, ranks.size, max_rows, num_words),
            inboxes=torch.tensor(inboxes.addresses, dtype=torch.int64, device=device),
            rounds=torch.zeros(max_rows, dtype=torch.int32, device=device),
            gone=torch.zeros(1, dtype=torch.int32, device=device),
        )
        ranks.on_abort.append(_exchange_aborter(exchange.gone))
    return exchange


def _max_rows(ranks: Ranks, num_words: int) -> int:
    """Return the most rows of ``num_words`` words that one all-reduce may have.

    Each row has a program, and all of them must run at once: one on each multiprocessor.
    """
    room = _MAX_BYTES_SENT // (8 * num_words * (ranks.size - 1))
    if ranks.device.type != "cuda":
        return min(room, _ROWS_ON_CPU)
    device = torch.cuda.get_device_properties(ranks.device)
    return min(room, int(device.multi_processor_count))


def _exchange_aborter(abort_flag: Tensor) -> Callable[[], None]:
    """Return a function that makes running kernels stop waiting. Any thread may call it."""
    if abort_flag.device.type != "cuda":
        return partial(abort_flag.fill_, 1)  # type: ignore[return-value]
    one = torch.ones(1, dtype=torch.int32, pin_memory=True)
    stream = torch.cuda.Stream(abort_flag.device)  # type: ignore[no-untyped-call]

    def end() -> None:
        # A waiting kernel blocks later work of its own stream, but not a copy in this one.
        with torch.cuda.stream(stream), torch.inference_mode(False):
            abort_flag.copy_(one, non_blocking=True)

    return end
