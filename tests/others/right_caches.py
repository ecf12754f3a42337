"""Search correct caches and engines: no run may fail.

``python -m tests.others.right_caches --runs 30`` searches each with 30 seeds of the profile
``dev``, and exits with status 1 if a run failed. The targets are those of the docs, of this
project, of transformers, and of nano-vllm and vLLM if ``python -m tests.others.fetch`` has
downloaded them. Some declare conditions that the harness counts. The tutorial's paged cache is also
searched with fast paths as users write them: no ``runs_with`` aims at them, and few histories reach
them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from time import process_time
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from pytest_roseinfer import FastPath, conformance, settings
from pytest_roseinfer.adapters.load_target import load_target
from pytest_roseinfer.capabilities.cache_data import HARNESS_CONDITIONS
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from tests.fresh_run import fresh_run
from tests.others.fetch import FOLDER, PROJECTS
from tests.tutorials import paged_kv
from tests.tutorials.printed import adapter_of_paged_kv, blocks, list_cache, page, tutorial_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.capabilities.cache_data import CacheSpec

_TRANSFORMERS_CONDITIONS = ("last_position", "name_used_again")


def _listed_class(code: str, name: str, **modules: ModuleType) -> type[Any]:
    """Return a class that a listing of the docs defines."""
    module = ModuleType(f"docs_{name}")
    with patch.dict(sys.modules, {**modules, module.__name__: module}):
        exec(code, vars(module))
    listed: type[Any] = vars(module)[name]
    return listed


def _with_conditions(adapter: type[Any], *conditions: str) -> type[Any]:
    """Return a subclass of an adapter that declares further conditions."""
    declared = dict.fromkeys((*adapter.conditions, *conditions))
    return type(adapter.__name__, (adapter,), {"conditions": tuple(declared)})


def _paged() -> type[Any]:
    return _listed_class(adapter_of_paged_kv(), "Paged", paged_kv=paged_kv)


def with_fast_path(least_rows: int, block_sizes: Sequence[int]) -> type[Any]:
    """Return the tutorial's paged cache with one batched write for rows that all begin a new block.

    The path needs at least ``least_rows`` rows, all of sequences that have tokens.
    """

    class FastPaged(_paged()):  # type: ignore[misc]
        paths: Mapping[str, FastPath] = {"new_blocks": FastPath(equals="row_by_row")}
        conditions = tuple(HARNESS_CONDITIONS)

        def make(self, spec: CacheSpec) -> None:
            super().make(spec)
            self.counts = Counter[str]()

        def path_counts(self) -> Mapping[str, int]:
            return self.counts

        def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
            cache = self.cache
            rows = [self.seqs[seq] for seq in seqs if seq in self.seqs and self.seqs[seq].length]
            roll_over = len(rows) == len(seqs) and all(
                not each.length % cache.size for each in rows
            )
            if not roll_over or len(seqs) < least_rows:
                super().append(seqs, key, value)
                self.counts["row_by_row"] += 1
                return
            if len(rows) > len(cache.spare):
                raise paged_kv.NoBlocks
            for each in rows:
                each.blocks.append(cache._take())
                each.length += 1
            new = [each.blocks[-1] for each in rows]
            cache.k[:, new, 0] = key.to(cache.k.dtype)
            cache.v[:, new, 0] = value.to(cache.v.dtype)
            self.counts["new_blocks"] += 1

    FastPaged.block_sizes = tuple(block_sizes)
    return FastPaged


def _how_to_engine() -> type[Any]:
    return _listed_class(blocks(page("how-to/engines.md"), language="python")[0], "MyEngine")


def _tutorial_engine() -> type[Any]:
    return _listed_class(tutorial_engine(), "MyEngine")


def _shipped(name: str, *conditions: str) -> type[Any]:
    return _with_conditions(load_target(f"pytest_roseinfer.targets.{name}"), *conditions)


def _fetched(project: str, name: str, *conditions: str) -> type[Any]:
    folder = str(FOLDER / project)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return _shipped(name, *conditions)


def _nano_vllm() -> type[Any]:
    adapter = _fetched("nano-vllm", "nano_vllm:NanoVllmAdapter", "name_used_again")
    # It is known to miss stored prefixes, in every search.
    adapter.prefixes = adapter.prefixes.but(finds="some")
    return adapter


RIGHT: Mapping[str, Callable[[], type[Any]]] = {
    "tutorial: list": lambda: _with_conditions(
        _listed_class(list_cache(), "ListCache"), "last_position"
    ),
    "tutorial: paged": lambda: _with_conditions(_paged(), *HARNESS_CONDITIONS),
    "tutorial: engine": _tutorial_engine,
    "how-to: engine": _how_to_engine,
    "transformers: DynamicCache": partial(
        _shipped, "dynamic_cache:DynamicCacheAdapter", *_TRANSFORMERS_CONDITIONS
    ),
    "transformers: PagedAttentionCache": partial(
        _shipped, "paged_attention_cache:PagedAttentionCacheAdapter", *HARNESS_CONDITIONS
    ),
    "transformers: forks": partial(
        _shipped, "paged_attention_cache:ForkedPagedAttentionCacheAdapter", *HARNESS_CONDITIONS
    ),
    "nano-vllm: BlockManager": _nano_vllm,
    "roseinfer: PerLayerManager": partial(_shipped, "roseinfer_kv:PerLayerManager"),
    "roseinfer: GroupedManager": partial(_shipped, "roseinfer_kv:GroupedManager"),
    "roseinfer: WindowedManager": partial(_shipped, "roseinfer_kv:WindowedManager"),
    "fast path: 4 rows": partial(with_fast_path, 4, (2, 3, 4, 5, 8, 16)),
    "fast path: 5 rows": partial(with_fast_path, 5, (4, 5, 8, 16)),
    "vllm: KVCacheManager": partial(_fetched, "vllm", "vllm_kv:VllmAdapter", *HARNESS_CONDITIONS),
    "vllm: windows": partial(_fetched, "vllm", "vllm_kv:WindowsVllmAdapter", *HARNESS_CONDITIONS),
    "vllm: offloading": partial(_fetched, "vllm", "vllm_offloading:OffloadingVllmAdapter"),
    "vllm: NIXL": partial(_fetched, "vllm", "vllm_nixl:NixlVllmAdapter"),
    "vllm: NIXL, block sizes": partial(_fetched, "vllm", "vllm_nixl:BlockSizesNixlVllmAdapter"),
    "vllm: states": partial(_fetched, "vllm", "vllm_states:StatesVllmAdapter"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of one run."""

    failures: Sequence[str]
    warnings: Sequence[str]
    rarest: str
    """Path or condition reached the fewest times, with that number."""
    examples: int
    seconds: float
    """Processor time."""


def run(adapter: type[Adapter], seed: int) -> Outcome:
    """Run the shipped tests of one target as ``dev`` does."""
    start, failures = process_time(), []
    with fresh_run(settings.Settings(seed=seed)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = conformance(adapter)()
        for name in tests.shipped():
            try:
                getattr(tests, name)()
            except pytest.skip.Exception:
                continue
            except Exception as failure:
                failures.append(f"{name}: {failure}".partition("\n")[0])
        (target,) = coverage.current().targets.values()
        failures += TargetVerdict(target).problems(require_paths=True)
        fewest = min(TargetVerdict(target).rows(), key=lambda row: row.times, default=None)
        rarest = f"{fewest.name} {fewest.times}" if fewest else "nothing declared"
        examples = target.histories
        notes = TargetVerdict(target).warnings()
    return Outcome(failures, notes, rarest, examples, process_time() - start)


def runs(names: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int, Outcome]]:
    """Run each target whose name begins with one of ``names``, or all without names."""
    for name, make in RIGHT.items():
        if names and not any(map(name.startswith, names)):
            continue
        project = name.partition(":")[0]
        if project in PROJECTS and not (FOLDER / project).exists():
            continue
        adapter = make()
        for seed in seeds:
            yield name, seed, run(adapter, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="first letters of target names (default: all targets)",
    )
    parser.add_argument("--runs", type=int, default=30, help="seeds for each (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    args = parser.parse_args(arguments)
    settings.choose_kernel_runtime()
    num_runs, num_failed = 0, 0
    for name, seed, outcome in runs(args.names, range(args.seed, args.seed + args.runs)):
        num_runs, num_failed = num_runs + 1, num_failed + bool(outcome.failures)
        word = "failed" if outcome.failures else "warned" if outcome.warnings else "passed"
        figures = f"{outcome.examples} examples, rarest: {outcome.rarest}, {outcome.seconds:.1f} s"
        print(f"{name}, seed {seed}: {word} ({figures})", flush=True)
        for line in (*outcome.failures, *outcome.warnings):
            print(f"  {line}", flush=True)
    print(f"{num_runs} runs, {num_failed} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
