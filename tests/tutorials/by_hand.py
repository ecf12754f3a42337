"""A property test of ``paged_kv`` that is written with Hypothesis only."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tutorials import paged_kv

LAYERS, HEADS, DIM = 2, 2, 3


class ByHand(RuleBasedStateMachine):
    library = paged_kv

    @initialize(blocks=st.integers(1, 8), size=st.integers(1, 4))
    def build(self, blocks: int, size: int) -> None:
        self.cache = self.library.PagedKV(LAYERS, blocks, size, HEADS, DIM)
        self.seqs: list[paged_kv.Seq] = []
        self.model: list[list[torch.Tensor]] = []
        self.written = 0

    @rule()
    def start(self) -> None:
        self.seqs.append(self.library.Seq())
        self.model.append([])

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        every = st.sampled_from(range(len(self.seqs)))
        rows = data.draw(st.lists(every, min_size=1, unique=True))
        shape = (2, LAYERS, len(rows), HEADS, DIM)
        count = torch.Size(shape).numel()
        new = torch.arange(self.written, self.written + count).float().view(shape)
        self.written += count
        try:
            self.cache.extend([self.seqs[row] for row in rows], new[0], new[1])
        except self.library.NoBlocks:
            return
        for at, row in enumerate(rows):
            self.model[row].append(new[:, :, at])

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(range(len(self.seqs))))
        self.seqs.append(self.cache.fork(self.seqs[parent]))
        self.model.append(list(self.model[parent]))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        dropped = data.draw(st.sampled_from(range(len(self.seqs))))
        self.cache.drop(self.seqs[dropped])
        self.model[dropped] = []

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(range(len(self.seqs))))
        keep = data.draw(st.integers(0, len(self.model[row])))
        self.cache.cut(self.seqs[row], keep)
        del self.model[row][keep:]

    @invariant()
    def all_reads_back(self) -> None:
        for seq, tokens in zip(self.seqs, self.model, strict=True):
            for layer in range(LAYERS):
                k, v = self.cache.read(seq, layer)
                assert len(k) == len(v) == len(tokens)
                for at, token in enumerate(tokens):
                    assert torch.equal(k[at], token[0, layer])
                    assert torch.equal(v[at], token[1, layer])

    @invariant()
    def books_are_right(self) -> None:
        blocks = [block for seq in self.seqs for block in seq.blocks]
        for block, count in enumerate(self.cache.refs):
            assert count == blocks.count(block)
            assert (block in self.cache.spare) == (count == 0)
        assert len(set(self.cache.spare)) == len(self.cache.spare)


TestByHand = ByHand.TestCase
