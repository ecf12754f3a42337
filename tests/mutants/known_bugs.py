"""Bugs that paged KV caches really had, as far as planted bugs stand for them.

The numbers are those of the project's list of known bugs; a row is left out until the part
of the engine that could have the bug exists.
"""

from __future__ import annotations

KNOWN_BUGS: dict[int, tuple[str, str]] = {
    1: ("vLLM #3347", "a fork or copy-on-write counts a shared block wrong"),
    2: ("vLLM #4764", "an evicted block stays in the prefix map and is handed out after reuse"),
    3: (
        "vLLM #11565 review",
        "the capacity check forgets that cached hits are among the free blocks",
    ),
    4: ("vLLM #1486, FlashInfer #3136", "a 32-bit slot or page offset wraps"),
    5: ("vLLM #936", "0 x NaN from the unwritten tail of a block"),
    6: ("vLLM #43869, LMDeploy #4157", "padding rows write into a real block"),
    7: ("vLLM #44701", "two kinds of cache key share one key space"),
    8: ("vLLM #15603", "block copy assumes another cache layout"),
    9: ("vLLM #4127", "head size must be a power of two"),
    10: ("vLLM-gaudi #329", "a chain of block copies done one by one"),
    11: ("SGLang #10637", "a prompt shorter than a page; size counted by key, not by value"),
    12: ("SGLang #12224", "two paths free the same slot"),
    13: ("mini-sglang #52, #46", "a matched prefix can be evicted under its user"),
    15: ("nano-vllm 25794a1", "chunked prefill attends past the chunk's end"),
    16: ("FlashInfer #527", "append ignores the strides of the cache it is given"),
    17: ("FlashInfer 288e143", "grid computed from heads runs out of bounds"),
    18: ("FlashInfer #2255", "64-bit positions read as 32-bit"),
    19: ("TRT-LLM #12648", "the tree's block is held in place of the sequence's own"),
    20: ("TRT-LLM #15018", "blocks are released before their content was stored"),
    23: ("LMDeploy #3589", "eviction does not reset a sequence's progress"),
    24: ("LMDeploy #3386", "a block's identity is a bare hash of its tokens"),
    25: ("several", "copy-on-write drops the old reference before it has a new block"),
    26: ("several", "lengths advanced before the batch is known to fit"),
    27: ("several", "a wrong-layer free asserts after it has already cleared the block"),
    28: ("several", "the scalar path casts a dtype, the batch path raises half-way"),
    29: ("several", "gather leaves stale values past the stored length"),
    30: ("several", "warm-up of a CUDA graph runs real forwards and writes over live blocks"),
    31: ("several", "identity check looks at first and last row only"),
    32: ("several", "constant-position check compares a sample of the rows"),
    33: ("several", "rollover copies or shares the wrong block when the full one is shared"),
    34: ("several", "K and V swapped, or V taken at K's stride"),
    35: ("tt-mlir #8479", "only row 0 of a batch was ever validated"),
}
