"""Counters: names of paths of engine, cache and attention, conditions of rows, and histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class EnginePath(StrEnum):
    """Engine paths, each counted once for every step or request that takes it.

    The slow twin of all of them runs one request at a time, each with its whole prompt in one step
    and nothing shared.
    """

    BATCHED = "engine_batched"
    """A step of several requests."""
    MIXED = "engine_mixed"
    """A step with both prefill and decode."""
    CHUNKED = "engine_chunked"
    """A chunk of a prompt other than its last."""
    ADMITTED_OUT_OF_ORDER = "engine_overtaken"
    """A request admitted before one that arrived earlier."""
    PREFIX_HIT = "engine_prefix_hit"
    """A prompt with a prefix in the prefix cache."""
    RECOMPUTED = "engine_resumed"
    """A request recomputed after preemption."""
    FREED_OUT_OF_WINDOW = "engine_gave_back"
    """Blocks of a running request that were freed because they left the windows of layers."""
    FORKED = "engine_forked"
    """A fork of a sequence, which shares its stored tokens."""
    FUSED = "engine_fused"
    """A forward pass on fused kernels."""
    FUSED_ALL_REDUCE = "engine_exchanged"
    """A forward pass whose kernels do all-reduces through memory that GPUs share."""
    STREAMING_GEMM = "engine_streamed"
    """A forward pass of few tokens on GEMMs that stream weights to warpgroups."""
    PAIRED_GEMM = "engine_paired"
    """A forward pass of many tokens on GEMMs whose programs share weights in pairs."""
    MEGAKERNEL = "engine_whole_step"
    """A resident step of one sequence whose forward pass is one kernel."""
    JOINED = "engine_joined"
    """A forward pass of few torch operations, on joined weights."""
    COMPILED = "engine_compiled"
    """A forward pass on layers fused by torch.compile."""
    PADDED_LM_HEAD = "engine_padded_head"
    """A forward pass whose LM head is padded beyond its vocabulary."""
    RESIDENT = "engine_resident"
    """A decode step of sequences whose state is on the device."""
    FUSED_ARGMAX = "engine_likeliest"
    """A greedy resident step whose last kernels take the argmax and advance the lengths."""
    PENALTIES = "engine_penalised"
    """A resident step that counts tokens on the device and applies penalties."""
    GUIDED = "engine_guided"
    """A resident step that applies the token bitmasks of guides."""
    LOGPROBS = "engine_told"
    """A resident step that returns logprobs with its tokens."""
    CUDA_GRAPH = "engine_graph"
    """A resident step replayed from a CUDA graph."""
    RUN_AHEAD = "engine_run_ahead"
    """A step launched before the previous step's tokens were read back."""
    DRAFT_VERIFICATION = "engine_verified"
    """A step that verifies drafts: one row per draft token, and one for the token before them."""
    PROMPTS_AS_ROWS = "engine_in_rows"
    """A launch of short prompts, with one row per token."""
    PROMPTS_IN_LAUNCHES = "engine_in_launches"
    """A step whose short prompts take several launches of rows."""
    DRAFTED = "engine_drafted"
    """Draft tokens stored for verification."""
    ACCEPTED = "engine_accepted"
    """Draft tokens that were accepted."""
    REJECTED = "engine_rejected"
    """Draft tokens that were rejected and rolled back."""
    CANCELLED = "engine_cancelled"
    """A request that was cancelled, alone or in a batch."""


# Counters of a cache: write paths, conditions of rows, and host work.
#
# Every fast path must equal ``Path.PER_TOKEN``, one ``append_token`` call per row, bit for bit over
# the whole cache.


class Path(StrEnum):
    """Write and copy paths of the cache."""

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


SCALAR_POSITION_PATHS = frozenset({Path.TRITON_FULL_BATCH, Path.TORCH_SCALAR})
GATHER_PATHS = frozenset({Path.TRITON_GATHER, Path.TORCH_GATHER})


class Condition(StrEnum):
    """Conditions of a row's last block before an append, and a lack of Triton."""

    FRESH = "fresh"
    IN_PLACE = "in_place"
    ROLLOVER = "rollover"
    ROLLOVER_SHARED = "rollover_shared"
    COPY_ON_WRITE = "copy_on_write"
    PADDING = "padding"
    TRITON_UNAVAILABLE = "triton_unavailable"


PathCounts = Counter[str]
"""Counts of each path and condition since the manager was built."""


class Work(StrEnum):
    """Keys of ``KVBlockManager.work_counts``: host work for a cache and its attention."""

    KV_PLANS = "kv_plans"
    """Appends planned."""
    STAGED_INDICES = "staged_indices"
    """Numbers uploaded to the device: positions, blocks, lengths, tokens."""
    TABLE_ROWS = "table_rows"
    """Rows of block tables uploaded to the device."""


# Attention paths; each must agree with the reference within tolerance.


class AttentionPath(StrEnum):
    """Kernels that computed the attention of some rows."""

    DECODE_TRITON = "attention_decode_triton"
    CHUNK_TRITON = "attention_chunk_triton"
    PREFILL_CUDA = "attention_prompts"
    """CUDA kernel equal to ``CHUNK_TRITON`` bit for bit, for sequences with many new tokens."""
    APPEND_AND_ATTEND = "attention_append_and_attend"
    """Triton kernel that also stores the token that it attends from."""
    APPEND_AND_ATTEND_CUDA = "attention_rows"
    """CUDA kernel with prefetching, equal to ``APPEND_AND_ATTEND`` bit for bit."""
    RESIDENT_REFERENCE = "attention_slots_reference"
    """Torch reference of ``APPEND_AND_ATTEND``."""
    REFERENCE = "attention_reference"
    BATCHED = "attention_batched"
    """SDPA for all decoding sequences of similar length at once."""


# Histograms.


STEP_TOKEN_BOUNDS = (1.0, *(float(8 << power) for power in range(12)))
"""Bounds of tokens per step, equal to vLLM's: 1, then 8, 16, 32 and so on up to 16384."""


@dataclass(slots=True)
class Histogram:
    """A histogram without locks. The one of prometheus-client takes a lock for each value."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """Number of values in each range; the last range has no upper bound."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound as Prometheus writes it, with the number of values up to it."""
        sums, total = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            sums.append((str(bound), float(total)))
        return sums
