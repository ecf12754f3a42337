"""Bugs of real paged KV caches that planted bugs stand for.

Rows with a plain number are of the first list of known bugs, rows with an S of that of the last
year, and rows with a T of that of the last months. Bugs in parts that neither the engine nor a
small cache of the tests has are left out.
"""

from __future__ import annotations

KNOWN_BUGS: dict[str, tuple[str, str]] = {
    "1": ("vLLM #3347", "a fork or copy-on-write counts a shared block wrong"),
    "2": ("vLLM #4764", "an evicted block stays in the prefix map, and is found after its reuse"),
    "3": (
        "vLLM #11565 review",
        "the capacity check forgets that cached hits are among the free blocks",
    ),
    "4": ("vLLM #1486, FlashInfer #3136", "a 32-bit slot or page offset wraps"),
    "5": ("vLLM #936", "0 x NaN from the unwritten tail of a block"),
    "6": ("vLLM #43869, LMDeploy #4157", "padding rows write into a real block"),
    "7": ("vLLM #44701", "two kinds of cache key share one key space"),
    "8": ("vLLM #15603", "block copy assumes another cache layout"),
    "9": ("vLLM #4127", "head size must be a power of two"),
    "10": ("vLLM-gaudi #329", "a chain of block copies is done one by one"),
    "11": ("SGLang #10637", "a prompt shorter than a page; size counted by key, not by value"),
    "12": ("SGLang #12224", "two paths free the same slot"),
    "13": ("mini-sglang #52, #46", "a matched prefix can be evicted while in use"),
    "14": ("mini-sglang 94fe255", "a cached entry is a view of a table that is later reused"),
    "15": ("nano-vllm 25794a1", "chunked prefill attends past the chunk's end"),
    "16": ("FlashInfer #527", "append ignores the strides of the cache"),
    "17": ("FlashInfer 288e143", "grid computed from heads runs out of bounds"),
    "18": ("FlashInfer #2255", "64-bit positions read as 32-bit"),
    "19": ("TRT-LLM #12648", "the tree's block is held in place of the sequence's own"),
    "20": ("TRT-LLM #15018", "blocks are released before their content was stored"),
    "21": ("transformers #37574", "a window is wrong exactly at its length"),
    "23": ("LMDeploy #3589", "eviction does not reset a sequence's progress"),
    "24": ("LMDeploy #3386", "a block's identity is a bare hash of its tokens"),
    "25": ("several", "copy-on-write drops the old reference before it has a new block"),
    "26": ("several", "lengths advanced before the batch is known to fit"),
    "27": ("several", "a wrong-layer free asserts after it has already cleared the block"),
    "28": ("several", "the scalar path casts a dtype, the batch path raises half-way"),
    "29": ("several", "gather leaves stale values past the stored length"),
    "30": ("several", "warm-up of a CUDA graph runs real forwards and writes over live blocks"),
    "31": ("several", "identity check compares first and last row only"),
    "32": ("several", "constant-position check compares a sample of the rows"),
    "33": ("several", "rollover copies or shares the wrong block when the full one is shared"),
    "34": ("several", "K and V swapped, or V taken at K's stride"),
    "35": ("tt-mlir #8479", "only row 0 of a batch was ever validated"),
    "S1": ("vllm #37076", "a matched block goes to another request before it is referenced"),
    "S2": ("vllm PR 38715, #38606", "a block is found before its tokens are written"),
    "S3": (
        "vllm #44701, #30931; LMCache #4086",
        "different contents have one key",
    ),
    "S4": ("sglang #22819", "a prefix that is exactly as long as a block, or as the prompt"),
    "S5": ("sglang #38319", "a prompt is cancelled between its chunks"),
    "S6": (
        "vllm-ascend #14055; vllm PR 49620",
        "a block is freed while a step that writes to it is in flight",
    ),
    "S7": (
        "vllm #45704, #52360",
        "a block is copied out while it is written, or reused before the copy is done",
    ),
    "S8": (
        "sglang #38031; TensorRT-LLM #8813",
        "swapped-out blocks return to the wrong place, or are read before they return",
    ),
    "S9": ("vllm #57661; sglang PR 35049", "a transfer between two pools is aborted half way"),
    "S10": ("LMCache #4463, #4247", "packed or interleaved K and V are read in another layout"),
    "S11": (
        "mlx-lm PR 1109; openvino.genai #4190",
        "rejected draft tokens are not rolled back, or too many are",
    ),
    "S12": ("vllm #53912, #39273", "state that cannot be truncated is truncated"),
    "S13": (
        "kvcached #446; TensorRT-LLM PR 10183",
        "a block out of a window is freed too early, too late, or twice across groups",
    ),
    "S14": ("vllm #50702, #57716", "a quantised key is read with another scale"),
    "S15": ("vllm #43810, PR 41834", "padding rows of a replayed graph write to real blocks"),
    "S16": ("vllm PR 47671, #50427", "a 32-bit offset wraps"),
    "S17": ("nano-vllm #187, PR 275", "ranks disagree about the number of blocks"),
    "S18": ("vllm #51187", "the output of a request depends on its batch"),
    "S19": (
        "open fix in a small engine",
        "of two equal texts, the duplicate's blocks are freed under one of them",
    ),
    "T1": (
        "sglang #31833, #37836",
        "states are indexed by request in a grid that is flat, so that later rows get others'",
    ),
    "T2": (
        "sglang #39342",
        "a mixed batch skips the checkpoint of a state, which is stored anyway",
    ),
    "T3": ("sglang #34760", "a state is ahead of its node in the tree, whose pages are wider"),
    "T4": (
        "vllm #53919, #53505",
        "accepted counts are read after rows were permuted; a state is copied back too far",
    ),
    "T5": (
        "vllm #50630",
        "a hit that is wrong only behind another request, or in two cold starts of one prompt",
    ),
    "T6": ("vllm #49499", "a sharded state is taken for a replicated one"),
    "T7": (
        "vllm #42097",
        "the local ratio of blocks is used for the other side of a transfer",
    ),
    "T8": (
        "vllm #56655, #44250, #42125",
        "a key without its embeddings mask or its adapter; an adapter reloaded under its name",
    ),
    "T9": ("sglang #24638", "a user's own key that spells the adapter's namespace"),
    "T10": (
        "sglang #38362; lmdeploy #4930; vllm #51640",
        "a store's key without cache dtype, weights or salt",
    ),
    "T11": (
        "kvcached #451; vllm #49125",
        "the granularity of a group's hash is lost",
    ),
    "T12": (
        "lmdeploy #4917; NeMo-RL #4018; vllm-omni #6739",
        "keys and values are kept over a change of weights; a reset that only logs",
    ),
    "T13": ("vllm-omni #6442", "sleep drops the data and keeps the hashes"),
    "T14": (
        "dynamo #15079; LMCache #4991",
        "a failed load is counted as loaded, or a failed store stays visible",
    ),
    "T15": ("dynamo #8419", "blocks are loaded into the tail instead of the prefix"),
    "T16": ("LMCache #4492", "a restart with a warm store finds other blocks"),
    "T17": ("LMCache #4385", "a tier returns another request's data"),
    "T18": ("vllm #46951, #48596", "a block is reused under a pending store"),
    "T19": ("vllm #49250", "a rejected load recovers to a wrong text"),
    "T20": (
        "sglang #33970, #33309",
        "pages are sent before they are written; an early prefix loses its suffix",
    ),
    "T21": (
        "vllm #46460; omlx #3690",
        "a fast path for the longest query as the longest context drops a cached prefix",
    ),
    "T22": ("sglang #29913", "scales are not moved with their data"),
    "T23": (
        "ROCm/ATOM #1417; sglang #30339",
        "the ring of a window lies outside the prefix cache",
    ),
    "T24": (
        "vllm #47783, #50576",
        "packed or interleaved layouts that writer and reader see differently",
    ),
    "T25": ("vllm #55927", "a wrong token at lengths of one residue"),
    "T26": ("local-inference-lab/vllm #480", "blocks are found after everything was evicted"),
    "T27": (
        "TensorRT-LLM #12306; ninfer #73",
        "a partial rebase corrupts shared pages; branches saved while shared pages are not pinned",
    ),
    "T28": (
        "vllm-mlx #385",
        "a trim that moves the offset only, and the stale tail is read",
    ),
    "T29": ("ferrox #37", "prefill starts again at 0 on an adopted prefix"),
    "T30": (
        "vllm #55092; llm-d-kv-cache #593",
        'a "removed" event while a copy lives; "cleared" ignored',
    ),
    "T31": ("seen in lmdeploy 0.18", "access times in whole seconds: no order of use within one"),
    "T32": ("seen in mini-sglang", "a page freed as a duplicate that stays in the table"),
}
