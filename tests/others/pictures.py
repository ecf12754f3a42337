"""Pictures of docs/findings: smallest failures found by search, run again and drawn by the harness.

``python -m tests.others`` draws those of each project that is installed or fetched.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import CacheSpec, History, RequestMix, RequestSpec, Sampling
from pytest_roseinfer.capabilities.beams import Reorder
from pytest_roseinfer.capabilities.preemption import Preempt, Resume
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.engines.run import run_mix
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run.machine import run_history
from pytest_roseinfer.search.recorder import record
from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter
from pytest_roseinfer.targets.nano_vllm import NanoVllmAdapter, WeaklyHashedNanoVllmAdapter
from pytest_roseinfer.targets.sglang_radix import SglangAdapter, sglang
from pytest_roseinfer.targets.transformers_engine import TransformersEngine
from pytest_roseinfer.targets.vllm_scheduler import VllmScheduler
from tests.others import (
    exllamav3_engine,
    generate_engine,
    lmdeploy_engine,
    mini_sglang,
    mlx_variants,
    tokasaurus_engine,
)
from tests.others.fetch import FOLDER, sources
from tests.others.found_scripts import PAGES
from tests.others.hybrid_cache import SelectsHybridRows
from tests.others.mlx_engine import MlxBatchEngine, MlxSerialEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.capabilities.operation import Operation


class WindowOfOne(DynamicCacheAdapter):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **DynamicCacheAdapter.option_choices,
        "window": (1,),
    }


class SmallerCache(TransformersEngine):
    """Builds a cache of half the size that it declares."""

    def make(self, mix: RequestMix) -> None:
        super().make(replace(mix, cache_tokens=mix.cache_tokens // 2))


class FindsSomeAndCollides(WeaklyHashedNanoVllmAdapter):
    """Declares that lookups may miss stored prefixes, which is another finding."""

    prefixes = WeaklyHashedNanoVllmAdapter.prefixes.but(finds="some")


class DecodesReasoning(SglangAdapter):
    """Marks all decoded tokens as reasoning, which the cache does not keep."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        for request in (self.requests[seq] for seq in seqs):
            request.reasoning_tokens = len(request.output_ids)


@contextmanager
def strip_thinking_cache() -> Iterator[None]:
    sglang()
    serving = import_module("sglang.srt.runtime_context").get_serving()
    with serving.override(strip_thinking_cache=True):
        yield


@dataclass(frozen=True, slots=True)
class Picture:
    adapter: type[Adapter]
    example: History | RequestMix
    summary: str
    """First words of the failure's message."""
    project: str = ""
    """Name of the fetched project; "" for one that is installed."""
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Setting of the project under which it fails."""

    def can_be_drawn(self) -> bool:
        return not self.project or (FOLDER / self.project).exists()

    def draw(self) -> str:
        """Run the example, which must fail as documented, and return its drawing."""
        check: Callable[..., object] = run_mix
        if isinstance(self.example, History):
            check = run_history
        if self.project and (folder := str(sources(self.project))) not in sys.path:
            sys.path.insert(0, folder)
        with self.setting(), TemporaryDirectory() as folder:
            try:
                check(self.adapter, self.example)
            except Difference as failure:
                if not failure.summary.startswith(self.summary):
                    raise
                record(self.adapter, self.example, check.__name__, failure, folder)
            (drawing,) = Path(folder).glob("*.svg")
            return drawing.read_text(encoding="utf-8")


def _mix(adapter: type[Adapter], *requests: RequestSpec, size: int, **fields: Any) -> RequestMix:
    """Return a mix with a cache of ``size`` tokens, and the first of each option not given."""
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    own = {name: fields.pop(name) for name in options.keys() & fields.keys()}
    return RequestMix(requests, cache_tokens=size, options=options | own, **fields)


def _one_text(*steps: Operation, block_size: int, **options: Any) -> History:
    """Return a history whose sequences all have one text of equal tokens, in two blocks."""
    spec = CacheSpec(block_size=block_size, num_blocks=2, num_heads=1, head_dim=1, options=options)
    return History(spec, steps, texts=((0, 0),))


PICTURES = {
    "window-of-one": Picture(
        WindowOfOne,
        History(
            CacheSpec(
                num_heads=1,
                head_dim=1,
                options={"layers": "sliding_attention", "window": 1, "select": "reorder_cache"},
            ),
            (Append((0,)), Append((0,))),
        ),
        "gather: sequence 0, layer 0, K: expected shape [2, 1, 1], found [3, 1, 1]",
    ),
    "preempted-request-waits": Picture(
        TransformersEngine,
        _mix(
            TransformersEngine,
            RequestSpec((5,), Sampling(6), cancel_after=5),
            RequestSpec((1,), Sampling(5)),
            size=7,
        ),
        "requests [1] have not ended after",
    ),
    "request-outgrows-the-cache": Picture(
        SmallerCache,
        _mix(SmallerCache, RequestSpec((16,), Sampling(5)), size=6),
        "a step raised RuntimeError: No requests can be scheduled",
    ),
    "stored-prefix-is-lost": Picture(
        NanoVllmAdapter,
        _one_text(Prefill(0, 2), Prefill(1, 2), Preempt(1), Append((0,)), block_size=2),
        "match_prefix() of text 0, 4 tokens long, found 0, though 2 of them are stored",
        project="nano-vllm",
    ),
    "equal-hashes": Picture(
        FindsSomeAndCollides,
        _one_text(Prefill(0, 4), Preempt(0), Resume(0, 4), block_size=2),
        "peek: sequence 0, layer 0, K: position 0, head 0 (2 of 4 wrong): expected text 0, token 0",
        project="nano-vllm",
    ),
    "slots-freed-while-cached": Picture(
        DecodesReasoning,
        _one_text(
            Append((0,)),
            Append((0,)),
            Preempt(0),
            Resume(0, 2),
            Preempt(0),
            block_size=1,
            tree_core_backend="rust",
        ),
        "layer 0: the free list names a block twice: [2, 1, 2]",
        project="sglang",
        setting=strip_thinking_cache,
    ),
    "limit-below-the-drafts": Picture(
        VllmScheduler,
        _mix(
            VllmScheduler,
            RequestSpec((5,), Sampling(1)),
            RequestSpec((5, 15), Sampling(1)),
            size=5,
            block_size=1,
            drafts=2,
            long_prefill_token_threshold=2,
        ),
        "a step raised AssertionError",
        project="vllm",
    ),
    "no-room-for-drafts": Picture(
        VllmScheduler,
        _mix(
            VllmScheduler,
            RequestSpec((15,), Sampling(1)),
            RequestSpec((15, 7), Sampling(1)),
            size=6,
            block_size=1,
            drafts=3,
            max_num_batched_tokens=3,
        ),
        "requests [1] have not ended after",
        project="vllm",
    ),
    "lmdeploy-preempted-state": Picture(
        lmdeploy_engine.KeepsStateOfPreempted,
        _mix(
            lmdeploy_engine.KeepsStateOfPreempted,
            RequestSpec((21,), Sampling(2)),
            RequestSpec((5,), Sampling(2)),
            size=3,
            block_size=2,
        ),
        "request 0, token 1: 15; alone it gets 18",
        project="lmdeploy",
    ),
    "lmdeploy-stale-state": Picture(
        lmdeploy_engine.SavesStateUnderStaleStep,
        _mix(
            lmdeploy_engine.SavesStateUnderStaleStep,
            RequestSpec((15,), Sampling(4)),
            RequestSpec((17,), Sampling(4)),
            size=5,
            block_size=2,
        ),
        "request 1, token 3: 31; alone it gets 6",
        project="lmdeploy",
    ),
    "mini-sglang-duplicate": Picture(
        mini_sglang.ReadsFreedPages,
        _mix(
            mini_sglang.ReadsFreedPages,
            RequestSpec((5,), Sampling(3)),
            RequestSpec((5,), Sampling(3)),
            size=4,
            block_size=1,
        ),
        "request 1, token 2: 3; alone it gets 20",
        project="mini-sglang",
    ),
    "mini-sglang-last-token": Picture(
        mini_sglang.EndsEarly,
        _mix(mini_sglang.EndsEarly, RequestSpec((16,), Sampling(2)), size=3, block_size=1),
        "request 0 ended after 1 tokens; alone it gets 2",
        project="mini-sglang",
    ),
    "mini-sglang-after-the-end": Picture(
        mini_sglang.OfflineMiniSglangEngine,
        _mix(
            mini_sglang.OfflineMiniSglangEngine,
            RequestSpec((21,), Sampling(6)),
            RequestSpec((16,), Sampling(1)),
            size=7,
            block_size=1,
        ),
        "request 0 had ended and got token 5: 24",
        project="mini-sglang",
    ),
    "mini-sglang-reused-row": Picture(
        mini_sglang.ReusesRows,
        _mix(
            mini_sglang.ReusesRows,
            RequestSpec((16,), Sampling(2)),
            RequestSpec((5, 15, 7), Sampling(1)),
            size=4,
            block_size=1,
        ),
        "request 1, token 0: 25; alone it gets 31",
        project="mini-sglang",
    ),
    "mini-sglang-cancelled": Picture(
        mini_sglang.CancelsInFlight,
        _mix(
            mini_sglang.CancelsInFlight,
            RequestSpec((5,), Sampling(2), cancel_after=1),
            size=3,
            block_size=1,
        ),
        "every request has ended, and the engine still holds 1 locked tokens",
        project="mini-sglang",
    ),
    "mini-sglang-admission": Picture(
        mini_sglang.AdmitsByTokens,
        _mix(
            mini_sglang.AdmitsByTokens,
            RequestSpec((5,), Sampling(1)),
            RequestSpec((3,), Sampling(1)),
            size=2,
        ),
        "a step raised AssertionError: Cannot evict 4, only 0 is evictable",
        project="mini-sglang",
    ),
    "exact-hit": Picture(
        MlxBatchEngine,
        _mix(
            MlxBatchEngine,
            RequestSpec((15, 27), Sampling(1)),
            RequestSpec((15,), Sampling(1), arrival=1),
            size=3,
        ),
        "request 1 was refused: ValueError",
        project="mlx-lm",
    ),
    "draft-not-stored": Picture(
        MlxSerialEngine,
        _mix(
            MlxSerialEngine,
            RequestSpec((5,), Sampling(1)),
            RequestSpec((5, 15), Sampling(2)),
            size=4,
        ),
        "request 1, token 1: 17; alone it gets 14",
        project="mlx-lm",
    ),
    "drafts-in-a-window": Picture(
        mlx_variants.DraftsInAWindow,
        _mix(
            mlx_variants.DraftsInAWindow,
            RequestSpec((16,), Sampling(5)),
            size=6,
        ),
        "request 0, token 4: 26; alone it gets 0",
        project="mlx-lm",
    ),
    "chunks-trimmed": Picture(
        mlx_variants.KeepsChunks,
        _mix(
            mlx_variants.KeepsChunks,
            RequestSpec((16,), Sampling(7)),
            RequestSpec((16,), Sampling(6)),
            size=8,
        ),
        "request 1, token 5: 22; alone it gets 27",
        project="mlx-lm",
    ),
    "mamba-padding": Picture(
        mlx_variants.BatchesMamba,
        _mix(
            mlx_variants.BatchesMamba,
            RequestSpec((5, 15), Sampling(1)),
            RequestSpec((5, 15, 7), Sampling(1)),
            size=4,
        ),
        "request 0, token 0: 21; alone it gets 22",
        project="mlx-lm",
    ),
    "nemotron-padding": Picture(
        mlx_variants.BatchesMambaAndAttention,
        _mix(
            mlx_variants.BatchesMambaAndAttention,
            RequestSpec((31, 23), Sampling(4)),
            RequestSpec((31, 23, 29), Sampling(1)),
            size=6,
        ),
        "request 0, token 3: 4; alone it gets 25",
        project="mlx-lm",
    ),
    "olmo-padding": Picture(
        mlx_variants.BatchesTheDeltaRule,
        _mix(
            mlx_variants.BatchesTheDeltaRule,
            RequestSpec((15, 27, 5), Sampling(1)),
            RequestSpec((15, 7), Sampling(1)),
            size=4,
        ),
        "request 1, token 0: 26; alone it gets 2",
        project="mlx-lm",
    ),
    "gemma2-mask": Picture(
        mlx_variants.BatchesSoftCaps,
        _mix(
            mlx_variants.BatchesSoftCaps,
            RequestSpec((16,), Sampling(1)),
            RequestSpec((5,), Sampling(1)),
            RequestSpec((16,), Sampling(1)),
            size=2,
        ),
        "a step raised ValueError: [broadcast_shapes]",
        project="mlx-lm",
    ),
    "window-and-itself": Picture(
        mlx_variants.SeesAWindowAndItself,
        _mix(
            mlx_variants.SeesAWindowAndItself,
            RequestSpec((5,), Sampling(8)),
            size=9,
        ),
        "request 0, token 7: 20; alone it gets 23",
        project="mlx-lm",
    ),
    "kept-tokens-dropped": Picture(
        mlx_variants.BoundsTheCache,
        _mix(
            mlx_variants.BoundsTheCache,
            RequestSpec((5, 15), Sampling(8)),
            size=10,
        ),
        "request 0, token 7: 14; alone it gets 15",
        project="mlx-lm",
    ),
    "minimax-positions": Picture(
        generate_engine.GeneratesMiniMax,
        _mix(
            generate_engine.GeneratesMiniMax,
            RequestSpec((16,), Sampling(2)),
            RequestSpec((5, 15), Sampling(1)),
            size=3,
        ),
        "request 0, token 1: 22; alone it gets 5",
    ),
    "jamba-chunks": Picture(
        generate_engine.GeneratesJamba,
        _mix(
            generate_engine.GeneratesJamba,
            RequestSpec((5, 15, 7, 13, 1, 3, 19, 17), Sampling(8)),
            size=16,
            prefill_chunk_size=3,
        ),
        "request 0, token 7: 31; alone it gets 15",
    ),
    "hybrid-rows": Picture(
        SelectsHybridRows,
        History(
            CacheSpec(
                block_size=1,
                num_blocks=2,
                num_heads=1,
                head_dim=1,
                options={"select": "batch_select_indices"},
            ),
            (Append((0, 1)), Reorder((0, 1), (0, 0))),
        ),
        "peek_state: sequence 1, layer 0: expected the state after all of its 1 token",
    ),
    "exllamav3-deferred-page": Picture(
        exllamav3_engine.SharesPageInPrefill,
        _mix(
            exllamav3_engine.SharesPageInPrefill,
            RequestSpec((6,), Sampling(1)),
            RequestSpec((5, 15), Sampling(1)),
            RequestSpec((5, 15, 16), Sampling(1)),
            size=12,
            block_size=2,
        ),
        "a step raised AssertionError",
        project="exllamav3",
    ),
    "exllamav3-unlinked-page": Picture(
        exllamav3_engine.ChecksPages,
        _mix(
            exllamav3_engine.ChecksPages,
            RequestSpec((5, 15, 7), Sampling(1)),
            RequestSpec((5, 15, 7), Sampling(2)),
            size=8,
            block_size=2,
        ),
        "a step raised AssertionError: Page table validation failed",
        project="exllamav3",
    ),
    "tokasaurus-one-token": Picture(
        tokasaurus_engine.CompletesOneToken,
        _mix(
            tokasaurus_engine.CompletesOneToken,
            RequestSpec((5,), Sampling(1)),
            RequestSpec((5,), Sampling(1)),
            size=2,
            block_size=2,
        ),
        "a step raised AssertionError",
        project="tokasaurus",
    ),
}
"""Pictures by their names in docs/findings."""


def file_of(name: str) -> Path:
    return PAGES / f"{name}.svg"
