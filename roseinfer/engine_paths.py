"""Names the engine's fast paths. Each must give the tokens that its slow twin gives."""

from __future__ import annotations

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
    DRAFTED = "engine_drafted"
    """Tokens that were stored before anybody knew whether they come next."""
    ACCEPTED = "engine_accepted"
    """Those of them that came next."""
    REJECTED = "engine_rejected"
    """Those that did not, and were rolled back."""
    CANCELLED = "engine_cancelled"
    """A request that was cancelled, beside others or alone."""
