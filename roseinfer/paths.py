"""The names of fast paths, each with the slow path that it must equal, and of conditions."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class EnginePath(StrEnum):
    """A path is counted once for every step or request that takes it.

    The slow twin of all of them runs one request after the other, each with its whole prompt in
    one step and nothing shared.
    """

    BATCHED = "engine_batched"
    """A step for several requests."""
    MIXED = "engine_mixed"
    """A step that stores prompts beside requests that decode."""
    CHUNKED = "engine_chunked"
    """A prompt stored in part."""
    OVERTAKEN = "engine_overtaken"
    """A request admitted before one that came earlier."""
    PREFIX_HIT = "engine_prefix_hit"
    """A prompt whose beginning was stored already."""
    RESUMED = "engine_resumed"
    """A request computed again after its blocks were taken from it."""
    GAVE_BACK = "engine_gave_back"
    """Blocks of a request that went on without them, since they had left the windows of layers."""
    FORKED = "engine_forked"
    """A sequence continued in a second way, sharing what it had stored."""
    FUSED = "engine_fused"
    """A forward pass on fused kernels."""
    EXCHANGED = "engine_exchanged"
    """A forward pass whose kernels add up over ranks through memory that GPUs share."""
    STREAMED = "engine_streamed"
    """A forward pass of few tokens in whose products warpgroups multiply what streams by."""
    PAIRED = "engine_paired"
    """A forward pass of many tokens in whose products pairs of programs share weights."""
    WHOLE_STEP = "engine_whole_step"
    """A resident step of one sequence whose forward pass is one kernel."""
    COMPILED = "engine_compiled"
    """A forward pass on layers that torch.compile has fused."""
    PADDED_HEAD = "engine_padded_head"
    """A forward pass whose language-model head is wider than its vocabulary."""
    RESIDENT = "engine_resident"
    """A decode step of sequences whose state is on the device."""
    LIKELIEST = "engine_likeliest"
    """A resident step, greedy for all, whose last kernels choose the tokens and count on."""
    PENALISED = "engine_penalised"
    """A resident step that tallies tokens on the device, and takes penalties by that."""
    GUIDED = "engine_guided"
    """A resident step that chooses among the tokens that guides allow."""
    TOLD = "engine_told"
    """A resident step that tells log-probabilities beside its tokens."""
    GRAPH = "engine_graph"
    """A resident step replayed from a CUDA graph."""
    RUN_AHEAD = "engine_run_ahead"
    """A step launched before the tokens of the one before it were read."""
    VERIFIED = "engine_verified"
    """A step of rows, one for each drafted token and for the token in front of them."""
    IN_ROWS = "engine_in_rows"
    """A step of prompts with few tokens, one row for each."""
    DRAFTED = "engine_drafted"
    """Tokens that were stored before anybody knew whether they come next."""
    ACCEPTED = "engine_accepted"
    """Those of them that came next."""
    REJECTED = "engine_rejected"
    """Those that did not, and were rolled back."""
    CANCELLED = "engine_cancelled"
    """A request that was cancelled, beside others or alone."""


# What a cache counts: the ways a token can reach it, what a row can meet there, and its work.
#
# Every fast path must equal ``Path.PER_TOKEN``, one ``append_token`` call a row, bit for bit over
# the whole cache.


class Path(StrEnum):
    """What moved the data."""

    TRITON_FULL_BATCH = "triton_full_batch"
    TRITON_IDENTITY_POS = "triton_identity_pos"
    TRITON_GATHER = "triton_gather"
    TORCH_SCALAR = "torch_scalar"
    TORCH_VECTOR = "torch_vector"
    TORCH_GATHER = "torch_gather"
    CLONE_TRITON = "clone_triton"
    CLONE_TORCH = "clone_torch"
    PER_TOKEN = "per_token"

    @property
    def needs_triton(self) -> bool:
        return "triton" in self.value

    @property
    def needs_rows(self) -> bool:
        return self in GATHER


SCALAR_POSITION = frozenset({Path.TRITON_FULL_BATCH, Path.TORCH_SCALAR})
GATHER = frozenset({Path.TRITON_GATHER, Path.TORCH_GATHER})


class Condition(StrEnum):
    """What a row found at the end of its block list, or what the machine lacked."""

    FRESH = "fresh"
    IN_PLACE = "in_place"
    ROLLOVER = "rollover"
    ROLLOVER_SHARED = "rollover_shared"
    COPY_ON_WRITE = "copy_on_write"
    PADDING = "padding"
    TRITON_UNAVAILABLE = "triton_unavailable"


PathCounts = Counter[str]
"""How often each path ran and each condition was met since the manager was built."""


class Work(StrEnum):
    """Keys of ``KVBlockManager.work_counts``: the host's work for a cache and its attention."""

    KV_PLANS = "kv_plans"
    """How often the places of new tokens were planned."""
    STAGED_INDICES = "staged_indices"
    """Numbers uploaded to the device: positions, blocks, lengths, tokens."""
    TABLE_ROWS = "table_rows"
    """Rows of block tables uploaded to the device."""


# The ways attention can be computed; each must agree with the reference within tolerance.


class AttentionPath(StrEnum):
    """What computed the attention of some rows."""

    DECODE_TRITON = "attention_decode_triton"
    CHUNK_TRITON = "attention_chunk_triton"
    PROMPTS = "attention_prompts"
    """Warpgroups do the same for prompts of many tokens, with the same bits."""
    APPEND_AND_ATTEND = "attention_append_and_attend"
    """This kernel also stores the token that it attends from."""
    ROWS = "attention_rows"
    """A kernel that fetches ahead does both, with the same bits."""
    SLOTS_REFERENCE = "attention_slots_reference"
    """Torch operations do the same."""
    REFERENCE = "attention_reference"
