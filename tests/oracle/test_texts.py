"""Texts against lists of the texts that introduced each position."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.pages import token_parts
from pytest_roseinfer.oracle.texts import WHOLE, Texts, TextSlice, duplicate_in_namespaces

_LENGTH = 12
_COMMON = 1


@dataclass(slots=True)
class _Tree:
    """Branches of texts, each with the introducing text of its first ``_LENGTH`` positions."""

    owners: list[list[int]] = field(default_factory=list)
    branch_offs: list[int] = field(default_factory=list)
    namespaces: list[int] = field(default_factory=list)

    def add(self, parent: int, length: int, namespace: int | None = None) -> int:
        text = len(self.owners)
        shared = self.owners[parent][:length] if text else []
        self.owners.append([*shared, *[text] * (_LENGTH - len(shared))])
        self.branch_offs.append(length)
        self.namespaces.append(self.namespaces[parent] if namespace is None else namespace)
        return text

    def token_ids(self, text: int, begin: int, end: int) -> TextSlice:
        positions = range(begin, end)
        owners = [self.owners[text][at] for at in positions]
        own = [self.branch_offs[owner] == at for owner, at in zip(owners, positions, strict=True)]
        ids = [owner + 1 if new else _COMMON for owner, new in zip(owners, own, strict=True)]
        return TextSlice(ids, self.namespaces[text])


def _draw(draw: random.Random) -> tuple[_Tree, tuple[tuple[int, int, int], ...]]:
    tree, branches = _Tree(), []
    for text in range(draw.randint(1, 6)):
        branch = (
            draw.randrange(max(1, text)),
            draw.randrange(_LENGTH) if text else 0,
            draw.randrange(2),
        )
        tree.add(*branch)
        branches.append(branch)
    return tree, tuple(branches)


@pytest.mark.parametrize("seed", range(10))
def test_texts_are_those_of_their_parents_up_to_the_branch(seed: int) -> None:
    draw = random.Random(seed)
    tree, branches = _draw(draw)
    texts = Texts(branches)
    for seq in range(4):
        parent, length = draw.randrange(len(tree.owners)), draw.randrange(_LENGTH)
        texts.fork(parent, seq, length)
        assert texts.of(seq, 0) == tree.add(parent, length)
    for text, owners in enumerate(tree.owners):
        assert [texts.owner(text, at) for at in range(_LENGTH)] == owners
        assert texts.text_slice(text, 3, _LENGTH) == tree.token_ids(text, 3, _LENGTH)
    texts.forget(1)
    assert texts.of(1, 2) == 3 % len(branches)
    assert texts.of(0, 2) == len(branches)


def test_copy_in_another_namespace_has_all_token_ids_of_a_text() -> None:
    branches = ((0, 0), (0, 4), (1, 7))
    texts, both = Texts(branches), Texts(duplicate_in_namespaces(branches))
    for text in range(len(branches)):
        tokens = texts.text_slice(text, 0, _LENGTH).tokens
        for namespace in range(2):
            ids = both.text_slice(2 * text + namespace, 0, _LENGTH)
            assert [each == _COMMON for each in ids.tokens] == [each == _COMMON for each in tokens]
            assert ids.namespace == namespace
        assert both.text_slice(2 * text, 0, WHOLE >> 10) == (
            both.text_slice(2 * text + 1, 0, WHOLE >> 10)._replace(namespace=0)
        )


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_sequences_follow_their_texts(seed: int, block_size: int) -> None:
    draw = random.Random(seed)
    tree, branches = _draw(draw)
    oracle = Oracle(block_size, 1000, branches=branches)
    lengths: dict[int, int] = {}
    text_of: dict[int, int] = {}
    lives = Counter[int]()

    def text(seq: int) -> int:
        return text_of.get(seq, (seq + lives[seq]) % len(branches))

    for _ in range(30):
        step = draw.choice(["append", "append", "fork", "truncate", "free"])
        seq = draw.choice(sorted(lengths) or [0])
        if step == "append":
            seq = draw.randrange(4)
            begin = lengths.get(seq, 0)
            count = draw.randint(1, 3)
            if begin + count > _LENGTH:
                continue
            rows = [(seq, count)]
            assert oracle.text_slices(rows) == [tree.token_ids(text(seq), begin, begin + count)]
            oracle.append(rows, oracle.new_tokens(rows))
            lengths[seq] = begin + count
        elif not lengths:
            continue
        elif step == "fork" and 4 not in lengths:
            oracle.fork(seq, 4)
            text_of[4] = tree.add(text(seq), lengths[seq])
            lengths[4] = lengths[seq]
        elif step == "truncate":
            length = draw.randint(0, lengths[seq])
            oracle.truncate(seq, length)
            if length < lengths[seq]:
                text_of[seq] = tree.add(text(seq), length)
                lives[seq] += 1
            lengths[seq] = length
        elif step == "free":
            oracle.free(seq)
            text_of.pop(seq, None)
            lives[seq] += 1
            del lengths[seq]
        for each, length in lengths.items():
            assert oracle.stored_text(each) == [tree.token_ids(text(each), 0, length)]
            parts = [token_parts(token) for token in oracle.tokens(each)]
            assert [position for _, position, _ in parts] == list(range(length))
            assert {namespace for *_, namespace in parts} <= {tree.namespaces[text(each)]}
            assert oracle.text_tokens(text(each), length) == oracle.tokens(each)
            for other, other_length in lengths.items():
                shared = range(min(length, other_length))
                same = [oracle.tokens(each)[at] == oracle.tokens(other)[at] for at in shared]
                owners = tree.owners[text(each)], tree.owners[text(other)]
                namespace = tree.namespaces[text(each)] == tree.namespaces[text(other)]
                assert same == [namespace and owners[0][at] == owners[1][at] for at in shared]
