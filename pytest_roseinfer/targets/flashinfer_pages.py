"""Adapter of FlashInfer's paged append and decode, which need a GPU."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.targets.paged_kernels import PagedKernelsAdapter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads per KV head that its decode kernel supports; others need tensor cores."""
_WORKSPACE = 128 << 20


class FlashInferAdapter(PagedKernelsAdapter):
    """FlashInfer's kernels that append to paged caches and attend to them."""

    dtypes: ClassVar[Sequence[str]] = ("float16", "bfloat16")
    head_counts: ClassVar[Sequence[int]] = (1, 2, 3, 8)
    head_dims: ClassVar[Sequence[int]] = (64, 128)  # each takes a minute to compile
    block_sizes: ClassVar[Sequence[int]] = (16, 1, 4, 5, 8, 32)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "layout": ("NHD", "HND"),
        "keys and values": ("in one tensor", "apart"),
    }

    def allocate(self, spec: CacheSpec) -> None:
        if find_spec("flashinfer") is None or not spec.device.startswith("cuda"):
            raise ModuleNotFoundError(
                "FlashInfer or a GPU is missing: pip install flashinfer-python ninja, and run "
                "pytest --roseinfer-gpu",
                name="flashinfer",
            )
        self.flashinfer = import_module("flashinfer")
        self.layout = spec.options["layout"]
        heads, size = spec.num_heads, spec.block_size
        page = (size, heads) if self.layout == "NHD" else (heads, size)
        shape = (spec.num_layers, spec.num_blocks, 2, *page, spec.head_dim)
        self.cache = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=spec.device)
        self.workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=spec.device)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.cache.unbind(2)
        if self.layout == "NHD":
            keys, values = keys.transpose(2, 3), values.transpose(2, 3)
        return keys, values

    def _pages(self, layer: int) -> Any:
        apart = self.spec.options["keys and values"] == "apart"
        return self.cache[layer].unbind(1) if apart else self.cache[layer]

    def _paged(self, seqs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return FlashInfer's arguments ``kv_indices``, ``kv_indptr`` and ``kv_last_page_len``."""
        tables = [self.tables[seq] for seq in seqs]
        ends = ((self.lengths[seq] - 1) % self.spec.block_size + 1 for seq in seqs)
        starts = accumulate(map(len, tables), initial=0)
        return self._ints(chain(*tables)), self._ints(starts), self._ints(ends)

    def _ints(self, numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor([*numbers], dtype=torch.int32, device=self.spec.device)

    def write(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        indices, starts, ends = self._paged(seqs)
        lengths = self.flashinfer.get_seq_lens(starts, ends, self.spec.block_size)
        row_starts = self._ints(accumulate(counts, initial=0))
        rows = self.flashinfer.get_batch_indices_positions(row_starts, lengths, sum(counts))
        for layer in range(self.spec.num_layers):
            new = (_aligned(each[layer].to(self.cache.dtype)) for each in (key, value))
            pages = self._pages(layer), indices, starts, ends, self.layout
            self.flashinfer.append_paged_kv_cache(*new, *rows, *pages)

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        spec, dtype = self.spec, self.cache.dtype
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            self.layout,
            use_tensor_cores=query.shape[1] // spec.num_heads not in _GROUPS,
        )
        indices, starts, ends = self._paged(seqs)
        shape = query.shape[1], spec.num_heads, spec.head_dim, spec.block_size
        wrapper.plan(starts, indices, ends, *shape, q_data_type=dtype, kv_data_type=dtype)
        output: torch.Tensor = wrapper.run(_aligned(query), self._pages(layer))
        return output


def _aligned(new: torch.Tensor) -> torch.Tensor:
    """Copy tensors that its kernels cannot read, since they load 16 bytes at a time."""
    steps = (new.storage_offset(), *new.stride()[:-1])
    readable = new.stride(-1) == 1 and not any(step * new.itemsize % 16 for step in steps)
    return new if readable else new.clone(memory_format=torch.contiguous_format)
