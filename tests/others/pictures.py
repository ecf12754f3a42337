"""Pictures of docs/findings: smallest failures found by search, and those written by hand.

``python -m tests.others`` draws those of each project that is installed or fetched.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import CacheSpec, History, RequestSpec, Sampling
from pytest_roseinfer.capabilities.beams import Reorder
from pytest_roseinfer.capabilities.epochs import Reset
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.preemption import Preempt, Resume
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter
from pytest_roseinfer.targets.nano_vllm import NanoVllmAdapter, WeaklyHashedNanoVllmAdapter
from pytest_roseinfer.targets.sglang_radix import SglangAdapter, sglang
from pytest_roseinfer.targets.transformers_engine import TransformersEngine
from pytest_roseinfer.targets.vllm_kv import EventsVllmAdapter
from pytest_roseinfer.targets.vllm_scheduler import VllmScheduler
from tests.others import (
    exllamav3_engine,
    generate_engine,
    lmdeploy_engine,
    mini_sglang,
    mlx_variants,
    tokasaurus_engine,
)
from tests.others.hybrid_cache import SelectsHybridRows
from tests.others.kvcached_blocks import BlocksAcrossPages
from tests.others.kvcached_vllm import FreesRefusedRequests, ResetsWhileRunning, SharesTheGpu
from tests.others.mlx_engine import MlxBatchEngine, MlxSerialEngine
from tests.others.picture import Picture, mix_of, one_text
from tests.others.transformers_variants import CompletesTwice, SmallerCache
from tests.others.written_pictures import WRITTEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch


class WindowOfOne(DynamicCacheAdapter):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **DynamicCacheAdapter.option_choices,
        "window": (1,),
    }


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


_SEARCHED = {
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
        mix_of(
            TransformersEngine,
            RequestSpec((5,), Sampling(6), cancel_after=5),
            RequestSpec((1,), Sampling(5)),
            size=7,
        ),
        "requests [1] have not ended after",
    ),
    "request-outgrows-the-cache": Picture(
        SmallerCache,
        mix_of(SmallerCache, RequestSpec((16,), Sampling(5)), size=6),
        "a step raised RuntimeError: No requests can be scheduled",
    ),
    "two-completions": Picture(
        CompletesTwice,
        mix_of(CompletesTwice, RequestSpec((1,), Sampling(1)), size=16),
        "a step raised RuntimeError: cannot reshape tensor of 0 elements",
    ),
    "stored-prefix-is-lost": Picture(
        NanoVllmAdapter,
        one_text(Prefill(0, 2), Prefill(1, 2), Preempt(1), Append((0,)), block_size=2),
        "match_prefix() of text 0, 4 tokens long, found 0, though 2 of them are stored",
        project="nano-vllm",
    ),
    "equal-hashes": Picture(
        FindsSomeAndCollides,
        one_text(Prefill(0, 4), Preempt(0), block_size=2),
        "match_prefix() of text 0, 4 tokens long, found 2, and only 0 of them may be found now",
        project="nano-vllm",
    ),
    "slots-freed-while-cached": Picture(
        DecodesReasoning,
        one_text(
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
        mix_of(
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
        mix_of(
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
    "copy-of-a-removed-block": Picture(
        EventsVllmAdapter,
        one_text(
            Append((0, 1)),
            Append((0, 1)),
            Preempt(0),
            Append((1,)),
            block_size=2,
        ),
        "by its events, the cache stores 0 tokens of text 0, and match_prefix() finds 2",
        project="vllm",
    ),
    "lmdeploy-preempted-state": Picture(
        lmdeploy_engine.KeepsStateOfPreempted,
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(mini_sglang.EndsEarly, RequestSpec((16,), Sampling(2)), size=3, block_size=1),
        "request 0 ended after 1 tokens; alone it gets 2",
        project="mini-sglang",
    ),
    "mini-sglang-after-the-end": Picture(
        mini_sglang.OfflineMiniSglangEngine,
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(
            mlx_variants.DraftsInAWindow,
            RequestSpec((16,), Sampling(5)),
            size=6,
        ),
        "request 0, token 4: 26; alone it gets 0",
        project="mlx-lm",
    ),
    "chunks-trimmed": Picture(
        mlx_variants.KeepsChunks,
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(
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
        mix_of(
            mlx_variants.SeesAWindowAndItself,
            RequestSpec((5,), Sampling(8)),
            size=9,
        ),
        "request 0, token 7: 20; alone it gets 23",
        project="mlx-lm",
    ),
    "kept-tokens-dropped": Picture(
        mlx_variants.BoundsTheCache,
        mix_of(
            mlx_variants.BoundsTheCache,
            RequestSpec((5, 15), Sampling(8)),
            size=10,
        ),
        "request 0, token 7: 14; alone it gets 15",
        project="mlx-lm",
    ),
    "minimax-positions": Picture(
        generate_engine.GeneratesMiniMax,
        mix_of(
            generate_engine.GeneratesMiniMax,
            RequestSpec((16,), Sampling(2)),
            RequestSpec((5, 15), Sampling(1)),
            size=3,
        ),
        "request 0, token 1: 22; alone it gets 5",
    ),
    "jamba-chunks": Picture(
        generate_engine.GeneratesJamba,
        mix_of(
            generate_engine.GeneratesJamba,
            RequestSpec((5, 15, 7, 13, 1, 3, 19, 17), Sampling(8)),
            size=16,
            prefill_chunk_size=3,
        ),
        "request 0, token 7: 31; alone it gets 15",
    ),
    "another-texts-state": Picture(
        generate_engine.GeneratesRecurrentGemma,
        mix_of(
            generate_engine.GeneratesRecurrentGemma,
            RequestSpec((1, 2), Sampling(1)),
            RequestSpec((7,), Sampling(1), arrival=1),
            size=3,
        ),
        "request 1, token 0: 2; alone it gets 23",
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
        mix_of(
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
        mix_of(
            exllamav3_engine.ChecksPages,
            RequestSpec((5, 15, 7), Sampling(1)),
            RequestSpec((5, 15, 7), Sampling(2)),
            size=8,
            block_size=2,
        ),
        "a step raised AssertionError: Page table validation failed",
        project="exllamav3",
    ),
    "kvcached-blocks-across-pages": Picture(
        BlocksAcrossPages,
        History(
            CacheSpec(block_size=2, num_blocks=5, num_heads=1, head_dim=1),
            (Append((0,)),),
            texts=((0, 0),),
        ),
        "layer 0: the cache counts 5 free blocks, and has 4",
        project="kvcached",
    ),
    "kvcached-reset-while-running": Picture(
        ResetsWhileRunning,
        one_text(Append((0,)), Reset(), Append((0,)), block_size=2),
        "match_prefix() of text 0, 3 tokens long, found 2, and only 0 of them may be found now",
        project="kvcached",
        imports=("vllm",),
    ),
    "kvcached-refused-request-keeps-blocks": Picture(
        SharesTheGpu,
        one_text(Prefill(0, 3), Prefill(1, 3), block_size=2),
        "layer 0: block 2 has refcount 2, and tables name it 1 time",
        project="kvcached",
        imports=("vllm",),
    ),
    "kvcached-exhausted-value-error": Picture(
        FreesRefusedRequests,
        History(
            CacheSpec(
                block_size=2,
                num_blocks=4,
                num_layers=2,
                num_heads=1,
                head_dim=1,
                windows=(None, 1),
                options={"blocks between kept ones": None, "eagle": False},
            ),
            (Prefill(0, 4), Free(0), Prefill(0, 5)),
            texts=((0, 0),),
        ),
        "the write raised ValueError: Cannot get 3 free blocks from the pool",
        project="kvcached",
        imports=("vllm",),
    ),
    "tokasaurus-one-token": Picture(
        tokasaurus_engine.CompletesOneToken,
        mix_of(
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
"""Pictures of failures that a search found, by their names in docs/findings."""

PICTURES = {**_SEARCHED, **WRITTEN}
"""All pictures by their names."""
