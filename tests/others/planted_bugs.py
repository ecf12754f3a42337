"""Bugs planted into fetched projects: ``python -m tests.others.planted_bugs [PROJECT]``.

Each bug is a change of one method of a project's own cache, made while the project runs: its files
stay as they are. A search of its engine, whose known findings are repaired, must find the bug.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from time import process_time
from typing import TYPE_CHECKING, Any

from pytest import MonkeyPatch  # noqa: PT013  used without a test

from pytest_roseinfer.findings.divergence import Difference
from tests.others import lmdeploy_engine, mini_sglang, tokasaurus_engine
from tests.others.engine_search import verdicts_of
from tests.others.fetch import sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer import EngineAdapter


@dataclass(frozen=True, slots=True)
class PlantedBug:
    module: str
    """Module and class, ``module:class``."""
    method: str
    plant: Callable[[Any], Any]
    """Function that returns a broken method for the right one."""


def _skip(_: Any) -> Any:
    return lambda *_, **__: None


def _returns(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *_, **__: value


# mini-sglang: its radix cache and the manager of its pages.


def _matches_another_token(right: Any) -> Any:
    return lambda node, ids: max(
        1, right(node, ids) + (right(node, ids) < min(node.length, len(ids)))
    )


def _splits_without_lock(right: Any) -> Any:
    def split_at(node: Any, position: int) -> Any:
        parent = right(node, position)
        parent.ref_count = 0
        return parent

    return split_at


def _inserts_all_but_a_page(right: Any) -> Any:
    def insert_prefix(cache: Any, ids: Any, indices: Any) -> Any:
        return right(cache, ids[: -cache.page_size or None], indices[: -cache.page_size or None])

    return insert_prefix


def _unlocks_twice(right: Any) -> Any:
    def lock_handle(cache: Any, handle: Any, unlock: bool = False) -> None:
        right(cache, handle, unlock=unlock)
        if unlock and not handle.node.is_root() and handle.node.ref_count > 0:
            right(cache, handle, unlock=True)

    return lock_handle


def _evicts_newest_first(right: Any) -> Any:
    def collect(cache: Any) -> Any:
        leaves = right(cache)
        newest = max((each.timestamp for each in leaves), default=0)
        for each in leaves:
            each.timestamp = newest - each.timestamp
        return leaves

    return collect


def _frees_a_page_less(right: Any) -> Any:
    return lambda manager, indices: right(manager, indices[manager.page_size :])


def _frees_twice(right: Any) -> Any:
    def free(manager: Any, indices: Any) -> None:
        right(manager, indices)
        right(manager, indices[: manager.page_size])

    return free


def _matches_the_whole_prompt(_: Any) -> Any:
    return lambda manager, request: manager.prefix_cache.match_prefix(request.input_ids)


def _counts_too_much_room(right: Any) -> Any:
    return property(lambda manager: right.fget(manager) + manager.page_size)


_RADIX = "minisgl.kvcache.radix_cache:RadixPrefixCache"
_NODE = "minisgl.kvcache.radix_cache:RadixTreeNode"
_PAGES = "minisgl.scheduler.cache:CacheManager"

# LMDeploy: its allocator, block manager, block trie and states.


def _allocates_a_block_less(right: Any) -> Any:
    return lambda _, seq, prealloc=0: max(0, right(seq, prealloc) - 1)


def _matches_any_block(_: Any) -> Any:
    return staticmethod(lambda *_: True)


def _matches_without_reference(right: Any) -> Any:
    def match(trie: Any, seq: Any) -> None:
        before = seq.num_blocks
        right(trie, seq)
        if seq.num_blocks > before:
            trie.allocator.add_ref_count(seq.logical_blocks.get_real_blocks()[before:], -1)

    return match


def _attaches_an_open_block(right: Any) -> Any:
    return lambda trie, seq, node, blocks: right(trie, seq, node, min(blocks + 1, seq.num_blocks))


def _keeps_step(right: Any) -> Any:
    def release(lifecycle: Any, seq: Any) -> None:
        step = seq.num_history_ids
        right(lifecycle, seq)
        seq.set_step(min(step, 1))

    return release


_TRIE = "lmdeploy.pytorch.paging.block_trie.trie:BlockTrie"
_KV = "lmdeploy.pytorch.paging.block_trie.kv_lifecycle:KVBlockLifecycle"
_STATES = "lmdeploy.pytorch.paging.block_trie.checkpoint_lifecycle:StateCheckpointLifecycle"
_BLOCKS = "lmdeploy.pytorch.paging.block_manager"
_LIFE = "lmdeploy.pytorch.paging.seq_states.states:SequenceLifecycle"

# tokasaurus: its block allocator, and that of rows.


def _matches_the_last_token(right: Any) -> Any:
    return lambda allocator, ids: right(allocator, [*ids, -1])


def _matches_a_further_block(right: Any) -> Any:
    def prefix_match(allocator: Any, ids: Any) -> Any:
        found = right(allocator, ids)
        further = list((found[-1] if found else allocator.prefix_tree).children.values())
        has_room = (len(found) + 1) * allocator.page_size < len(ids)
        return [*found, *further[: 1 if has_room else 0]]

    return prefix_match


def _keeps_matched_blocks_free(right: Any) -> Any:
    def assign(allocator: Any, block: Any, seq: str) -> None:
        free = allocator.num_free_blocks
        right(allocator, block, seq)
        if block.parent is not None:
            allocator.num_free_blocks = free

    return assign


def _keeps_used_leaves(right: Any) -> Any:
    def assign(allocator: Any, block: Any, seq: str) -> None:
        was_leaf = block in allocator.available_leaves
        right(allocator, block, seq)
        if was_leaf:
            allocator.available_leaves.add(block)

    return assign


def _stores_turned_tokens(right: Any) -> Any:
    def update(allocator: Any, blocks: Any, ids: Any) -> None:
        size = allocator.page_size
        right(allocator, blocks, [*ids[size:], *ids[:size]])

    return update


def _stores_an_open_block(right: Any) -> Any:
    def free(allocator: Any, seq: str, indices: Any, ids: Any) -> Any:
        room = len(indices) * allocator.page_size - len(ids)
        return right(allocator, seq, indices, [*ids, *[0] * min(1, room)])

    return free


_ALLOCATOR = "tokasaurus.manager.allocator:BlockAllocator"
_TREE_BLOCK = "tokasaurus.manager.allocator:PrefixTreeBlock"
_ROWS = "tokasaurus.manager.allocator:BatchIndexAllocator"


BUGS: dict[str, dict[str, PlantedBug]] = {
    "mini-sglang": {
        "a token that differs is matched": PlantedBug(
            _NODE, "get_match_len", _matches_another_token
        ),
        "a split node loses its lock": PlantedBug(_NODE, "split_at", _splits_without_lock),
        "the last page is not inserted": PlantedBug(
            _RADIX, "insert_prefix", _inserts_all_but_a_page
        ),
        "an unlock counts twice": PlantedBug(_RADIX, "lock_handle", _unlocks_twice),
        "the newest leaf is evicted": PlantedBug(
            _RADIX, "_collect_leave_nodes_for_evict", _evicts_newest_first
        ),
        "a page is not freed": PlantedBug(_PAGES, "_free", _frees_a_page_less),
        "a page is freed twice": PlantedBug(_PAGES, "_free", _frees_twice),
        "the whole prompt is matched": PlantedBug(_PAGES, "match_req", _matches_the_whole_prompt),
        "there is a page more than there is": PlantedBug(
            _PAGES, "available_size", _counts_too_much_room
        ),
        "a matched prefix is not locked": PlantedBug(_PAGES, "lock", _skip),
    },
    "lmdeploy": {
        "a block too few is required": PlantedBug(
            f"{_BLOCKS}.default_block_manager:DefaultBlockManager",
            "num_required_blocks",
            _allocates_a_block_less,
        ),
        "blocks are not freed": PlantedBug(
            f"{_BLOCKS}.default_block_manager:DefaultBlockManager", "free", _skip
        ),
        "a block in the window is dropped": PlantedBug(
            f"{_BLOCKS}.window_block_manager:WindowBlockManager",
            "allocate_msg",
            lambda right: (
                lambda manager, seq, prealloc=0: right(
                    manager, seq, prealloc + seq.block_size * (seq.num_history_ids > 4)
                )
            ),
        ),
        "a block of an equal hash is matched": PlantedBug(
            _TRIE, "_node_matches_block", _matches_any_block
        ),
        "a matched block is not referenced": PlantedBug(_TRIE, "match", _matches_without_reference),
        "a block that is not full is shared": PlantedBug(
            _TRIE, "_extend_trie_path", _attaches_an_open_block
        ),
        "a parent is no candidate for eviction": PlantedBug(
            _KV, "_add_parent_leaf_candidate", _skip
        ),
        "a leaf that gains a child stays a leaf": PlantedBug(_KV, "begin_path_extension", _skip),
        "a restored state is not pinned": PlantedBug(_STATES, "pin_restore", _returns(True)),
        "a released request keeps a token": PlantedBug(
            _LIFE, "release_paging_resources", _keeps_step
        ),
    },
    "tokasaurus": {
        "the last token is matched": PlantedBug(
            _ALLOCATOR, "prefix_match", _matches_the_last_token
        ),
        "a block of other tokens is matched": PlantedBug(
            _ALLOCATOR, "prefix_match", _matches_a_further_block
        ),
        "a matched block counts as free": PlantedBug(
            _ALLOCATOR, "assign_block_to_seq", _keeps_matched_blocks_free
        ),
        "a used block stays a leaf": PlantedBug(
            _ALLOCATOR, "assign_block_to_seq", _keeps_used_leaves
        ),
        "blocks are stored under tokens of others": PlantedBug(
            _ALLOCATOR, "update_prefix_tree", _stores_turned_tokens
        ),
        "a block that is not full is stored": PlantedBug(
            _ALLOCATOR, "free_and_update", _stores_an_open_block
        ),
        "blocks are not freed": PlantedBug(_ALLOCATOR, "free_and_update", _skip),
        "a freed block keeps its tokens": PlantedBug(_TREE_BLOCK, "wipe", _skip),
        "a block too few is required": PlantedBug(
            _ALLOCATOR,
            "num_blocks_needed",
            lambda right: lambda *args: max(0, right(*args) - 1),
        ),
        "a row is given twice": PlantedBug(
            _ROWS, "allocate", lambda _: lambda rows: rows.available_indices[0]
        ),
    },
}
PARTS: dict[str, Callable[[str], Any]] = {
    "mini-sglang": mini_sglang._part,
    "lmdeploy": lambda name: lmdeploy_engine._part(name.removeprefix("pytorch.")),
    "tokasaurus": tokasaurus_engine._part,
}
"""Function that imports a module of each project, without what needs a GPU."""
ENGINES: dict[str, type[EngineAdapter]] = {
    "mini-sglang": mini_sglang.RepairedMiniSglangEngine,
    "lmdeploy": lmdeploy_engine.RepairedLmdeployEngine,
    "tokasaurus": tokasaurus_engine.RepairedTokasaurusEngine,
}


def search(project: str, bug: PlantedBug, examples: int) -> str:
    """Plant a bug and search; return the first line of the failure, or "" if nothing is found."""
    module, _, name = bug.module.partition(":")
    PARTS[project](module.partition(".")[2])
    owner = getattr(import_module(module), name)
    with MonkeyPatch.context() as patch:
        patch.setattr(owner, bug.method, bug.plant(getattr(owner, bug.method)))
        try:
            verdicts_of(ENGINES[project], examples=examples)
        except Difference as failure:
            return failure.summary
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(BUGS)
    parser.add_argument("projects", nargs="*", metavar="PROJECT", help=f"{names} (default: all)")
    parser.add_argument("--examples", type=int, default=300, help="mixes for each (default: 300)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for project in args.projects or BUGS:
        sys.path.insert(0, str(sources(project)))
        for name, bug in BUGS[project].items():
            start = process_time()
            summary = search(project, bug, args.examples) or "not found"
            print(f"{project}, {name}: {summary} ({process_time() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
