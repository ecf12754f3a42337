"""Trees of drafts: continuations of a sequence, of which one path is accepted.

The oracle counts drafts as the last tokens of their sequence, which are not read back. The first
draft after each token continues that token's text, and each other one begins a text of its own. An
accepted path replaces the drafts, and later tokens differ from dropped ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    RankPolicy,
    optional,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.misuse import Call, MisuseState, misuse
from pytest_roseinfer.capabilities.preemption import Preempt
from pytest_roseinfer.capabilities.writes import Append, Prefill, begin_sequence
from pytest_roseinfer.oracle.pages import State, Written, token_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from pytest_roseinfer.oracle.texts import TextSlice


ROOT = -1
"""Parent of the first drafts: the last token of the sequence."""
Parents = tuple[int, ...]
"""Parent of each draft of a tree, which comes before it, or ``ROOT``."""


class DraftTreeMethods:
    """Adapter methods for trees of drafts."""

    @optional
    def append_trees(
        self,
        seqs: Sequence[int],
        parents: Sequence[Sequence[int]],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store a tree of drafts after each of these sequences: all trees, or none.

        Draft ``j`` of ``seqs[i]`` follows draft ``parents[i][j]``, which comes before it, or the
        last token of the sequence if that is -1. The keys and values of one tree are contiguous. A
        tree takes the blocks and positions that as many appended tokens would take, and copies a
        shared block before. Until ``accept_paths``, its sequence is only freed or preempted. It
        reads back with its drafts at the end or without them, and no lookup finds a draft.
        """

    @optional
    def accept_paths(self, seqs: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Append the drafts of one path to each of these sequences, and drop its other drafts.

        ``paths[i]`` lists drafts of ``seqs[i]``, the first one after the sequence's last token and
        each other one after the one before; it may be empty. They move to consecutive positions,
        and the blocks after the last of them become free. No other positions change.
        """


class Tree(NamedTuple):
    """The drafts of a sequence."""

    parents: Parents
    tokens: list[int]
    texts: list[int]
    """Text that each draft continues; empty without texts."""

    def path_to(self, draft: int) -> Parents:
        """Return the path from the root to a draft; an empty one to the root."""
        path: Parents = ()
        while draft != ROOT:
            path = (draft, *path)
            draft = self.parents[draft]
        return path

    def has_path(self, path: Parents) -> bool:
        """Return True if a path begins after the root and its drafts follow each other."""
        exist = all(0 <= draft < len(self.parents) for draft in path)
        return exist and all(
            self.parents[draft] == parent for parent, draft in pairwise((ROOT, *path))
        )


def depths(parents: Parents) -> list[int]:
    """Return the number of drafts before each draft on its path."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


def is_tree(parents: Parents) -> bool:
    """Return True if each draft follows the root or a draft before it."""
    return bool(parents) and all(ROOT <= parent < at for at, parent in enumerate(parents))


@dataclass(slots=True)
class DraftTrees(State):
    """Trees whose paths are not accepted yet."""

    any_of: ClassVar = ("append_trees",)

    open: dict[int, Tree] = field(default_factory=dict)
    """Tree of each sequence that has drafts."""

    def unwritten(self, seq: int) -> int:
        return len(self.open[seq].parents) if seq in self.open else 0

    def on_free(self, seq: int) -> None:
        self.open.pop(seq, None)


def open_trees(oracle: operation.Oracle) -> dict[int, Tree]:
    """Return the tree of each sequence that has drafts."""
    return oracle.ensure_state(DraftTrees).open


def _plan_tree(oracle: operation.Oracle, seq: int, parents: Parents) -> Tree:
    """Return a tree after a sequence, for which the oracle gets new texts or lives."""
    length, texts = oracle.length(seq), oracle.texts
    root = oracle.text_of(seq) if texts else oracle.lives[seq]
    branches: list[int] = []
    """Text that each draft continues; without texts, life of its sequence."""
    tokens: list[int] = []
    for draft, (parent, depth) in enumerate(zip(parents, depths(parents), strict=True)):
        at = length + depth
        branch = root if parent == ROOT else branches[parent]
        if parent in parents[:draft] and texts:
            branch = texts.branch(branch, at)
        elif parent in parents[:draft]:
            oracle.lives[seq] += 1
            branch = oracle.lives[seq]
        branches.append(branch)
        tokens += texts.tokens(branch, at, at + 1) if texts else [token_of(seq, at, branch)]
    return Tree(parents, tokens, branches if texts else [])


def _accept(oracle: operation.Oracle, seq: int, path: Parents) -> None:
    """Replace the drafts of a sequence by those of a path."""
    tree = open_trees(oracle).pop(seq)
    oracle.replace_last(seq, len(tree.parents), [tree.tokens[draft] for draft in path])
    if len(path) == len(tree.parents):
        return
    if oracle.texts:
        text = tree.texts[path[-1]] if path else oracle.text_of(seq)
        oracle.texts.assign(seq, oracle.texts.branch(text, oracle.length(seq)))
    else:
        oracle.lives[seq] += 1


def _halves(rows: Sequence[tuple[int, Parents]]) -> list[Sequence[tuple[int, Parents]]]:
    """Split a batch, in the order in which its sequences get new texts."""
    at, in_order = len(rows) // 2, sorted(rows)
    return [half for half in (in_order[:at], in_order[at:]) if half]


@operation.register("AppendTrees")
class AppendTrees(operation.Write):
    """Store a tree of drafts after each of these sequences."""

    seqs: tuple[int, ...]
    parents: tuple[Parents, ...]
    layout: str = "plain"

    needs = frozenset({"append_trees", "accept_paths"})
    needs_tokens = True

    def rows(self) -> operation.Rows:
        return [(seq, len(tree)) for seq, tree in self.trees()]

    def trees(self) -> list[tuple[int, Parents]]:
        return list(zip(self.seqs, self.parents, strict=True))

    def describe(self) -> str:
        each = ", ".join(f"{list(parents)} to sequence {seq}" for seq, parents in self.trees())
        return f"append drafts with these parents: {each}{self.describe_layout()}"

    def uses(self) -> list[int]:
        return list(self.seqs)

    def possible(self, oracle: operation.Oracle) -> bool:
        return all(map(is_tree, self.parents)) and operation.Operation.possible(self, oracle)

    def _plan(self, oracle: operation.Oracle) -> list[Tree]:
        """Return the tree of each sequence; their order in the batch does not change new texts."""
        planned = {seq: _plan_tree(oracle, seq, parents) for seq, parents in sorted(self.trees())}
        return [planned[seq] for seq in self.seqs]

    def tokens(self, oracle: operation.Oracle) -> operation.Tokens:
        return [token for tree in self._plan(oracle.preview()) for token in tree.tokens]

    def text_slices(self, oracle: operation.Oracle) -> list[TextSlice]:
        """Return the token ids of drafts, with the keys of the longest path of each tree."""
        preview = oracle.preview()
        if not (texts := preview.texts):
            return []
        slices: list[TextSlice] = []
        for tree, seq in zip(self._plan(preview), self.seqs, strict=True):
            length, text = oracle.length(seq), oracle.text_of(seq)
            at = [length + depth for depth in depths(tree.parents)]
            token_ids = [
                texts.token(texts.owner(branch, position), position)
                for branch, position in zip(tree.texts, at, strict=True)
            ]
            whole = texts.text_slice(text, length, max(at) + 1)
            slices.append(whole._replace(tokens=token_ids))
        return slices

    def may_find_blocks(self) -> bool:
        return False

    def change(self, oracle: operation.Oracle) -> None:
        trees = self._plan(oracle)
        oracle.append(self.rows(), [token for tree in trees for token in tree.tokens])
        open_trees(oracle).update(zip(self.seqs, trees, strict=True))

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.append_trees(self.seqs, self.parents, cache.key, cache.value)

    def reversed(self) -> operation.Operation:
        return AppendTrees(self.seqs[::-1], self.parents[::-1], self.layout)

    def halves(self) -> list[operation.Operation]:
        halves = (tuple(zip(*half, strict=True)) for half in _halves(self.trees()))
        return [AppendTrees(seqs, parents, self.layout) for seqs, parents in halves]

    def simpler(self) -> Iterator[operation.Operation]:
        for at, parents in enumerate(self.parents):
            chain = tuple(range(ROOT, len(parents) - 1))
            for fewer in (chain, parents[:-1]):
                if fewer and fewer != parents:
                    yield AppendTrees(
                        self.seqs, (*self.parents[:at], fewer, *self.parents[at + 1 :]), self.layout
                    )

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> AppendTrees:
            seqs = writer.shuffle(writer.filled)[: writer.between(1, _MAX_TREES)]
            return _draw_trees(writer, seqs)

        if writer.filled:
            yield operation.DrawOption(141, 3, draw_step)


@operation.register("AcceptPaths")
class AcceptPaths(operation.Operation):
    """Accept one path of each of these sequences' drafts, and drop the others."""

    seqs: tuple[int, ...]
    paths: tuple[Parents, ...]

    needs = frozenset({"append_trees", "accept_paths"})
    moves_tokens = True

    def accepted(self) -> list[tuple[int, Parents]]:
        return list(zip(self.seqs, self.paths, strict=True))

    def describe(self) -> str:
        each = (f"{list(path) or 'none'} of sequence {seq}" for seq, path in self.accepted())
        return f"accept these drafts, and drop the others: {', '.join(each)}"

    def changed_seqs(self) -> list[int]:
        return list(self.seqs)

    def possible(self, oracle: operation.Oracle) -> bool:
        trees = open_trees(oracle)
        exist = trees.keys() >= {*self.seqs} and len({*self.seqs}) == len(self.seqs)
        return exist and all(trees[seq].has_path(path) for seq, path in self.accepted())

    def fill_in_numbers(self, oracle: operation.Oracle) -> operation.Operation:
        """Return a copy with the part of each path that its tree has."""
        trees = open_trees(oracle)
        paths = [
            next(path[:end] for end in range(len(path), -1, -1) if trees[seq].has_path(path[:end]))
            if seq in trees
            else path
            for seq, path in self.accepted()
        ]
        return AcceptPaths(self.seqs, tuple(paths))

    def written(self, oracle: operation.Oracle) -> Written:
        trees = open_trees(oracle)
        rows = [(seq, len(path)) for seq, path in self.accepted()]
        return Written(
            rows, [trees[seq].tokens[at] for seq, path in self.accepted() for at in path]
        )

    def change(self, oracle: operation.Oracle) -> None:
        for each in sorted(self.accepted()):
            _accept(oracle, *each)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.accept_paths(self.seqs, self.paths)

    def copies_blocks(self, oracle: operation.Oracle) -> bool:  # noqa: ARG002
        return True

    def reversed(self) -> operation.Operation:
        return AcceptPaths(self.seqs[::-1], self.paths[::-1])

    def halves(self) -> list[operation.Operation]:
        halves = (tuple(zip(*half, strict=True)) for half in _halves(self.accepted()))
        return [AcceptPaths(seqs, paths) for seqs, paths in halves]

    def simpler(self) -> Iterator[operation.Operation]:
        for at, path in enumerate(self.paths):
            if path:
                yield AcceptPaths(self.seqs, (*self.paths[:at], path[:-1], *self.paths[at + 1 :]))

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if trees := open_trees(writer.oracle):
            yield operation.DrawOption(142, 6, lambda: _draw_paths(writer, trees))


@operation.register("FreeWithDrafts")
class FreeWithDrafts(operation.Operation):
    """Free a sequence that has drafts."""

    seq: int

    needs = frozenset({"append_trees", "accept_paths", "free"})

    def describe(self) -> str:
        return f"free sequence {self.seq}, which has drafts"

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in open_trees(oracle)

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.free(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.free(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if trees := open_trees(writer.oracle):
            yield operation.DrawOption(143, 1, lambda: cls(writer.pick([*trees])))


@operation.register("PreemptWithDrafts")
class PreemptWithDrafts(operation.Operation):
    """Preempt a sequence that has drafts, which are dropped."""

    seq: int

    needs = frozenset({"append_trees", "accept_paths", "preempt", "resume"})

    def describe(self) -> str:
        return f"preempt sequence {self.seq}, whose drafts are dropped"

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in open_trees(oracle)

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        _accept(oracle, self.seq, ())
        Preempt(self.seq).change(oracle)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.preempt(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if trees := open_trees(writer.oracle):
            yield operation.DrawOption(144, 1, lambda: cls(writer.pick([*trees])))


# Drawing


_MAX_TREES = 3
"""Most trees of one drawn step."""
_MAX_DRAFTS = 8
"""Most drafts of a drawn tree."""


def _draw_trees(writer: operation.Writer, seqs: Sequence[int]) -> AppendTrees:
    trees = tuple(_draw_parents(writer, seq) for seq in seqs)
    return AppendTrees(tuple(seqs), trees, writer.layout())


def _draw_parents(writer: operation.Writer, seq: int) -> Parents:
    """Draw a chain, siblings, two branches, or any tree, which often ends near a block boundary."""
    oracle = writer.oracle
    room = -oracle.length(seq) % oracle.block_size
    near = {2, 3, 4, room, room + 1, room + 2, room + oracle.block_size}
    count = writer.pick(sorted(each for each in near if 0 < each <= _MAX_DRAFTS))
    each = range(count)
    shape = writer.between(0, 4)
    if shape == 0:
        return tuple(at - 1 for at in each)
    if shape == 1:
        return tuple(ROOT for _ in each)
    if shape == 2:
        return tuple(max(ROOT, at - 2) for at in each)
    return tuple(writer.between(ROOT, at - 1) for at in each)


def _draw_paths(writer: operation.Writer, trees: Mapping[int, Tree]) -> AcceptPaths:
    seqs = writer.shuffle([*trees])[: writer.between(1, len(trees))]
    return AcceptPaths(tuple(seqs), tuple(_draw_path(writer, trees[seq]) for seq in seqs))


def _draw_path(writer: operation.Writer, tree: Tree) -> Parents:
    """Draw a path, most often to one of the last drafts."""
    last = len(tree.parents) - 1
    return tree.path_to(writer.pick([*range(ROOT, last), last, last, last]))


def _to_last_draft(oracle: operation.Oracle) -> Iterator[operation.Operation]:
    """Yield a step that accepts the last draft of each tree, with its path."""
    if trees := open_trees(oracle):
        paths = [tree.path_to(len(tree.parents) - 1) for tree in trees.values()]
        yield AcceptPaths(tuple(trees), tuple(paths))


def accept_near_boundary(writer: operation.Writer) -> None:
    """Open with trees near the end of a block, of which one path is accepted; or add no steps.

    Some of their sequences share that block with a fork, or repeat the text of another one, whose
    block an accepted path may equal.
    """
    if not writer.live and writer.pick((True, True, False)):
        operation.add_while_fitting(writer, _accept_near_boundary(writer))


def _accept_near_boundary(writer: operation.Writer) -> Iterator[operation.Operation]:
    size, can = writer.oracle.block_size, writer.adapter.abilities
    length = writer.pick((max(1, size - 1), size, max(1, size - 2), 2 * size - 1))
    begin_sequence(writer, length)
    if writer.no_more_steps or not writer.filled:
        return
    if writer.reuses_prefixes and length >= size and writer.between(0, 1):
        yield Prefill(writer.name_with_prefix(length), max(1, size - 1), writer.layout())
    if Fork.needs <= can and writer.between(0, 1):
        yield Fork.draw_for_any(writer)
    yield _draw_trees(writer, writer.shuffle(writer.filled)[: writer.between(1, 2)])
    if writer.live and writer.between(0, 1):
        yield Append(tuple(writer.live), writer.layout())
    yield _draw_paths(writer, open_trees(writer.oracle))
    yield Append((writer.filled[0],), writer.layout())


# Conditions


_CONDITIONS = {
    "draft_branches": "A tree is stored in which two drafts have one parent. Required of a cache "
    "that defines ``append_trees``.",
    "path_moved": "An accepted path is not the first drafts, so that it must move. Required of the "
    "same caches.",
    "path_over_blocks": "Accepted drafts that move come to lie in several blocks. Required of the "
    "same caches.",
    "no_draft_accepted": "All drafts of a tree are dropped, and its sequence goes on. Required of "
    "the same caches.",
    "drafts_after_shared_block": "A tree begins in a block that another sequence holds. Required "
    'of the same caches if forks share all ``"blocks"``, of several tokens.',
    "freed_with_drafts": "A sequence is freed while it has drafts. Required of the same caches if "
    "they define ``free``.",
}


def _required_conditions(adapter: type[Any]) -> list[str]:
    """Return the conditions of trees that are required of a cache."""
    if "append_trees" not in adapter.abilities:
        return []
    forks = "fork" in adapter.abilities and adapter.prefixes.shares != "none"
    shares = forks and adapter.fork_shares == "blocks" and max(adapter.block_sizes) > 1
    lacking = {"drafts_after_shared_block"} if not shares else set()
    lacking |= {"freed_with_drafts"} if "free" not in adapter.abilities else set()
    return [name for name in _CONDITIONS if name not in lacking]


class DraftConditions(Observer):
    """Counter of trees and paths that a cache may handle wrongly."""

    any_of = ("append_trees",)
    conditions: ClassVar = _CONDITIONS

    def before(self, step: operation.Operation) -> Mapping[str, int]:
        oracle = self.run.oracle
        if isinstance(step, AppendTrees) and step.fits(oracle):
            branching = [len({*parents}) < len(parents) for parents in step.parents]
            shared = oracle.conditions_met(step.rows()).count("copy_on_write")
            return {"draft_branches": sum(branching), "drafts_after_shared_block": shared}
        if isinstance(step, AcceptPaths):
            moved = [row for row in step.accepted() if row[1] != tuple(range(len(row[1])))]
            return {
                "path_moved": len(moved),
                "path_over_blocks": sum(self._blocks(*row) > 1 for row in moved),
                "no_draft_accepted": step.paths.count(()),
            }
        return {"freed_with_drafts": int(isinstance(step, FreeWithDrafts))}

    def _blocks(self, seq: int, path: Parents) -> int:
        """Count the blocks that get drafts of a path."""
        oracle, size = self.run.oracle, self.run.oracle.block_size
        begin = oracle.length(seq) - oracle.unwritten(seq)
        return len({at // size for at in range(begin, begin + len(path))})


def refuse_trees(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a cache whose trees cannot be judged."""
    if "append_trees" not in adapter.abilities:
        return
    others = [name for name in ("use_states", "reset", "load_prefix") if adapter.defines(name)]
    others += ["windows"] * bool(adapter.windows.groups)
    others += ["truncation.lengths"] * (adapter.truncation.lengths != "any")
    if others:
        raise TypeError(
            f"{adapter.__name__} defines append_trees, which cannot be judged with "
            f"{' or '.join(others)} yet: leave out one of them"
        )


# Bad calls


@misuse("append_trees")
def accept_without_drafts(at: MisuseState) -> Iterator[Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.accept_paths, [seq], [[0]])
        yield "accept_paths of a sequence that has no drafts", call


DRAFT_TREES = Capability(
    methods=DraftTreeMethods,
    states=(DraftTrees,),
    preludes=(Prelude(("append_trees",), 8, accept_near_boundary),),
    needs={"append_trees": ("accept_paths",), "accept_paths": ("append_trees",)},
    refuse=(refuse_trees,),
    misuse=(accept_without_drafts,),
    sharded={"append_trees": RankPolicy.WRITE, "accept_paths": RankPolicy.SAME},
    finishing_steps=_to_last_draft,
    observers=(DraftConditions,),
    required_conditions=_required_conditions,
    operations=(AppendTrees, AcceptPaths, FreeWithDrafts, PreemptWithDrafts),
)
