"""A model that nano-vllm's runner can run without a GPU: it stores keys that tell what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.targets.others.nano_vllm import INSTALL
from pytest_roseinfer.targets.others.without_its_top import part_of
from pytest_roseinfer.targets.whole_engines.telling_keys import key_of, likeliest

if TYPE_CHECKING:
    from types import SimpleNamespace


class NanoVllmModel:
    """Attends to what the runner's context points at, and stores where it says."""

    def __init__(self, config: SimpleNamespace, vocabulary: int) -> None:
        self.block_size, self.vocabulary = config.kvcache_block_size, vocabulary
        self.keys = [-1] * config.num_kvcache_blocks * config.kvcache_block_size
        self.get_context: Any = part_of("nanovllm", "utils.context", INSTALL).get_context

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> list[int]:
        """Return the key of the last token of each sequence."""
        context = self.get_context()
        if context.is_prefill:
            ends, lengths = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.diff().tolist()
        else:
            ends, lengths = [*range(len(tokens) + 1)], context.context_lens.tolist()
        places = zip(positions.tolist(), context.slot_mapping.tolist(), strict=True)
        new = [*zip(tokens.tolist(), places, strict=True)]
        last = []
        for row, length in enumerate(lengths):
            own: list[int] = []
            rows = new[ends[row] : ends[row + 1]]
            for before, (token, (position, slot)) in enumerate(rows, length - len(rows)):
                seen = own
                if context.block_tables is not None:
                    seen = self._stored(context.block_tables[row].tolist(), before)
                own.append(key_of(token, position, seen))
                self.keys[slot] = own[-1]
            last.append(own[-1])
        return last

    def _stored(self, table: list[int], length: int) -> list[int]:
        size = self.block_size
        return [self.keys[table[at // size] * size + at % size] for at in range(length)]

    def compute_logits(self, keys: list[int]) -> torch.Tensor:
        """Return the likeliest tokens, which the runner's sampler hands on."""
        return torch.as_tensor([likeliest(key, self.vocabulary) for key in keys])
