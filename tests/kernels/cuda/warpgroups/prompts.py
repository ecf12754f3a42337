"""Prompts that are attended to, and what their attention should be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda import decode_attention, prefill_attention
from roseinfer.kernels.cuda.prefill_attention import PromptSizes, attend_prompts
from roseinfer.layer_traits import LayerTraits, RotaryEmbedding
from tests.kernels.cuda.whole_step.emulated import EMULATION, EmulatedProgram

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from roseinfer.kernels.cuda.decode_attention import RowSizes
    from roseinfer.kernels.cuda.toolchain import Program

TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Prompts:
    """Sequences as (tokens stored before, new ones), and the heads that look at them."""

    sequences: Sequence[tuple[int, int]]
    kv_heads: int = 2
    group: int = 4
    dim: int = 64
    block_size: int = 64

    @property
    def sizes(self) -> PromptSizes:
        return PromptSizes(self.dim, self.group, self.block_size)


class Attention:
    """A cache whose blocks lie in any order, with NaN wherever no token is stored, and queries."""

    def __init__(
        self,
        prompts: Prompts,
        device: str = "cpu",
        *,
        sharp: float = 1.0,
        rotates: bool = False,
    ) -> None:
        """With ``rotates`` it is the kernel that rotates queries, by angles of every position."""
        draw = torch.Generator().manual_seed(len(prompts.sequences) + prompts.block_size)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=draw).bfloat16().to(device)

        self.prompts = prompts
        heads, size, dim = prompts.kv_heads, prompts.block_size, prompts.dim
        lengths = [before + new for before, new in prompts.sequences]
        held = [-(-length // size) for length in lengths]
        # As layers are of a whole cache: blocks of both lie further apart than they are long.
        room = torch.full((2, sum(held) + 1, heads, size, dim), float("nan"), dtype=torch.bfloat16)
        self.k_cache, self.v_cache = room.to(device)
        blocks = iter((torch.randperm(sum(held), generator=draw) + 1).tolist())
        self.tables = torch.zeros((len(held), max(held)), dtype=torch.int64)
        for at, (length, count) in enumerate(zip(lengths, held, strict=True)):
            for block in range(count):
                own = self.tables[at, block] = next(blocks)
                inside = min(size, length - block * size)
                for cache in (self.k_cache, self.v_cache):
                    cache[own, :, :inside] = numbers(heads, inside, dim)
        self.tables = self.tables.to(device)
        new = sum(count for _, count in prompts.sequences)
        # Queries lie beside keys and values.
        wide = numbers(new, heads * (prompts.group + 2), dim) * sharp
        query_heads = heads * prompts.group
        self.query, self.key, self.value = wide.tensor_split([query_heads, query_heads + heads], 1)
        self.traits = LayerTraits(dim**-0.5)
        self.device = device
        angles = torch.rand((max(lengths), dim // 2), generator=draw).repeat(1, 2) * 6
        cosines, sines = (each.bfloat16().to(device) for each in (angles.cos(), angles.sin()))
        self.rotation = RotaryEmbedding(cosines, sines) if rotates else None

    def tiles(self, tokens: int) -> tuple[Tensor, ...]:
        """Cut the sequences into tiles of so many tokens, as a forward pass does it."""
        sequences = self.prompts.sequences
        begins = accumulate((new for _, new in sequences), initial=0)
        found = [
            (at, row + begin, min(tokens, new - begin), before + begin)
            for at, ((before, new), row) in enumerate(
                zip(self.prompts.sequences, begins, strict=False)
            )
            for begin in reversed(range(0, new, tokens))
        ]
        return tuple(torch.tensor(found, device=self.device).T.contiguous())

    def computed(self, program: Program | None = None, programs: int | None = None) -> Tensor:
        """Have the kernel compute it."""
        given = self.query, self.k_cache, self.v_cache, self.tables
        tiles = self.tiles(self.prompts.sizes.tokens)
        return attend_prompts(
            *given, tiles, self.traits, self.rotation, program=program, programs=programs
        )

    @property
    def positions(self) -> Tensor:
        """Where the new tokens stand."""
        each = [torch.arange(before, before + new) for before, new in self.prompts.sequences]
        return torch.cat(each).to(self.device)

    @property
    def rotated(self) -> Tensor:
        """The queries as they are attended with."""
        if self.rotation is None:
            return self.query
        return self.rotation.apply_to_queries(self.query, self.positions)

    def expected(self) -> Tensor:
        """Compute it in float64."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        query = self.rotated.cpu().double()
        caches = self.k_cache.cpu(), self.v_cache.cpu()
        row = 0
        for (before, new), table in zip(self.prompts.sequences, self.tables.cpu(), strict=True):
            length = before + new
            keys, values = (
                cache[table].transpose(1, 2).flatten(0, 1)[:length].double() for cache in caches
            )
            seen = torch.arange(length)[None] <= torch.arange(before, length)[:, None]
            own = query[row : row + new].view(new, -1, self.prompts.group, self.prompts.dim)
            scores = torch.einsum("nhgd,shd->hgns", own, keys) * self.traits.scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[row : row + new] = torch.einsum("hgns,shd->nhgd", weights, values).flatten(1, 2)
            row += new
        return out


def emulated(
    sizes: PromptSizes | RowSizes, folder: Path, text: str | None = None, **more: object
) -> EmulatedProgram:
    """Return the kernel for an emulated machine; ``text`` is what runs in place of its source."""
    text = text or sizes.source(EMULATION)
    module = prefill_attention if isinstance(sizes, PromptSizes) else decode_attention
    return EmulatedProgram(sizes, folder, kernel=module.KERNEL, text=text, **more)  # type: ignore[arg-type]
