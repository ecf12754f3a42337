"""Prompts in a prefill cache, and their receives: the oracle's part, and what must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    describe_error,
    invariant,
    location_of_block,
)
from pytest_roseinfer.capabilities.payload import as_bits, same_bits
from pytest_roseinfer.oracle.pages import State, token_of
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from pytest_roseinfer.oracle.oracle import Oracle

# The oracle's part


@dataclass(frozen=True, slots=True)
class RemoteShape:
    """The shape of a prefill cache."""

    block_size: int
    num_blocks: int
    ranks: int

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks for a number of tokens."""
        return -(-tokens // self.block_size)


@dataclass(slots=True)
class Receive:
    """A sequence that is being received."""

    num_tokens: int
    num_written: int
    """Number of tokens of the prompt that were written when it began."""
    retried: bool = False
    """True if an earlier receive of the prompt was cancelled half way."""
    num_arrived: int = 0
    """Number of transfers that have ended whole."""
    num_lost: int = 0
    """Number of transfers that have failed."""
    failed: bool = False
    """True once the cache reported that it failed."""


@dataclass(slots=True)
class Remote(State):
    """Prompts in the prefill cache, and their receives."""

    any_of: ClassVar = ("begin_receive",)
    uncertain_room: ClassVar = True
    spared_blocks: ClassVar = "blocks of transfers in flight"

    num_heads: int = 1
    """Number of KV heads, which the ranks of the prefill cache share."""
    keeps_cancelled: bool = True
    """True if the prompt of a receive that is cancelled stays in the prefill cache."""
    while_prefilling: bool = True
    """True if a receive may begin before its prompt is written to the end."""
    shape: RemoteShape | None = None
    """Shape of the prefill cache; None before it is built."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Number of tokens in the prefill cache, by sequence."""
    receives: dict[int, Receive] = field(default_factory=dict)
    cancelled: dict[int, int] = field(default_factory=dict)
    """Number of transfers of the latest cancelled receive that had arrived, by sequence."""
    num_leaving: int = 0
    """Blocks of the prefill cache whose prompts have ended while transfers are in flight."""
    num_in_flight: int = 0
    """Number of transfers in flight."""
    held: int = 0
    """Number of blocks of transfers in flight that no sequence has."""
    lost: bool = False
    """True if a transfer failed in the present step."""

    @classmethod
    def of(cls, adapter: Any, spec: Any) -> Remote:
        traits = adapter.remote
        return cls(spec.num_heads, traits.keeps_cancelled, traits.while_prefilling)

    @property
    def pending_seqs(self) -> Collection[int]:
        return [seq for seq in self.prompts if seq not in self.receives]

    @property
    def hidden(self) -> Collection[int]:
        return self.receives.keys()

    def unwritten(self, seq: int) -> int:
        return self.receives[seq].num_tokens if seq in self.receives else 0

    def blocks_to_spare(self, seqs: Collection[int]) -> int:  # noqa: ARG002
        return self.held

    def end_prompt(self, seq: int) -> None:
        """Remove a prompt, whose blocks transfers in flight may still read."""
        self.num_leaving += self.blocks_of(seq) * bool(self.num_in_flight)
        del self.prompts[seq]
        self.receives.pop(seq, None)
        self.cancelled.pop(seq, None)

    def blocks_of(self, seq: int) -> int:
        """Return the number of blocks of a prompt in the prefill cache."""
        return self.shape.blocks(self.prompts[seq]) if self.shape else 0

    def missing(self, seq: int) -> int:
        """Return the number of tokens of a receive that the prefill cache does not have yet."""
        return self.receives[seq].num_tokens - self.prompts[seq]

    def room(self, seq: int) -> int:
        """Return the number of tokens that may be written to a prompt, which may be a new one."""
        if self.shape is None:
            return 0
        used = sum(map(self.blocks_of, self.prompts)) + self.num_leaving
        size = self.shape.block_size
        room = max(0, self.shape.num_blocks - used) * size + -self.prompts.get(seq, 0) % size
        return min(room, self.missing(seq)) if seq in self.receives else room

    def is_complete(self, seq: int) -> bool:
        """Return True for a receive whose tokens are all written, and that has not failed."""
        return seq in self.receives and not (self.missing(seq) or self.receives[seq].failed)


def remote_of(oracle: Oracle) -> Remote:
    return oracle.ensure_state(Remote)


def prompt_tokens(oracle: Oracle, seq: int, begin: int, end: int) -> list[int]:
    """Return the tokens of a prompt from ``begin`` to ``end``."""
    if oracle.texts:
        return oracle.text_tokens(oracle.text_of(seq), end)[begin:]
    return [token_of(seq, at, oracle.lives[seq]) for at in range(begin, end)]


# Invariants


@invariant(rank=11, needs=("begin_receive",))
def receive_statuses(observation: Observation) -> Finding | None:
    """A receive is done when all of its tokens have arrived, and not before."""
    remote, transfers = remote_of(observation.oracle), observation.after.transfers
    if isinstance(transfers, Exception):
        return Finding(f"transfers_in_flight() raised {describe_error(transfers)}", cause=transfers)
    for seq, status in observation.after.receive_statuses.items():
        location = Location(0, {seq: None})
        if isinstance(status, Exception):
            problem = f"poll_receive({seq}) raised {describe_error(status)}"
            return Finding(problem, location, status, kind=f"raised {type(status).__name__}")
        coming = [each.id for each in transfers if each.seq == seq]
        if wrong := _wrong_status(remote, seq, status, coming):
            problem = f"poll_receive({seq}) returned {status!r}, and {wrong}"
            return Finding(problem, location, kind=f"{status} wrongly")
    return None


def _wrong_status(remote: Remote, seq: int, status: str, coming: list[int | str]) -> str:
    """Describe what contradicts the status of a receive; empty if nothing does."""
    missing, receive = remote.missing(seq), remote.receives[seq]
    unwritten = f"{missing} of its {receive.num_tokens} tokens are not written yet"
    if status == "done":
        return unwritten if missing else f"transfer {coming[0]!r} is in flight" if coming else ""
    if status == "failed":
        return "" if receive.num_lost else "none of its transfers has failed"
    return "" if missing or coming else "all of it is written, and no transfer of it is in flight"


@invariant(rank=15, needs=("begin_receive", "peek_remote"))
def remote_prompts(observation: Observation) -> Finding | None:
    """The prefill cache must keep each prompt unchanged until its receive is done."""
    remote = remote_of(observation.oracle)
    for (seq, layer), result in observation.after.remote_reads.items():
        call, location = f"peek_remote({seq}, {layer})", Location(layer, {seq: None})
        if isinstance(result, Exception):
            kind = f"raised {type(result).__name__}"
            return Finding(f"{call} raised {describe_error(result)}", location, result, kind=kind)
        tokens = prompt_tokens(observation.oracle, seq, 0, remote.prompts[seq])
        expected = observation.payload.layer(tokens, layer)
        for kind, right, actual in zip("KV", expected, result, strict=True):
            if not same_bits(right, actual):
                problem = _describe_remote(observation, layer, kind, right, actual)
                return Finding(f"{call}, {kind}: {problem}", location, kind=f"{kind} differs")
    return None


def _describe_remote(
    observation: Observation,
    layer: int,
    kind: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
) -> str:
    """Describe the first difference of the keys or values of a prompt."""
    for name in ("shape", "dtype", "device"):
        right, found = getattr(expected, name), getattr(actual, name)
        if right != found:
            return f"expected {name} {right}, found {found}"
    at, head = (as_bits(expected) != as_bits(actual)).any(-1).nonzero()[0].tolist()
    rows = expected[at, head], actual[at, head].contiguous()
    known = sorted(observation.first_writers)
    contents = observation.payload.describe_mismatch(*rows, layer, head, kind, known)
    return f"position {at}, head {head}: {contents.describe()}"


@invariant(rank=23, needs=("begin_receive", "remote_free_blocks"))
def remote_blocks(observation: Observation) -> Finding | None:
    """The prefill cache must hold the blocks of its prompts, and no others."""
    remote, free = remote_of(observation.oracle), observation.after.remote_free_blocks
    if remote.shape is None or free is None:
        return None
    if isinstance(free, Exception):
        return Finding(f"remote_free_blocks() raised {describe_error(free)}", cause=free)
    most = sum(map(remote.blocks_of, remote.prompts))
    statuses = observation.after.receive_statuses
    least = sum(remote.blocks_of(seq) for seq in remote.prompts if statuses.get(seq) != "done")
    if observation.after.transfers:
        most += remote.num_leaving
    used = remote.shape.num_blocks - free
    right = f"{least}" if least == most else f"{least} to {most}"
    problem = f"the prefill cache has {format_count(used, 'block')} in use, and {right} are right"
    if used > most:
        return Finding(f"{problem}: some are not freed", kind="not freed")
    if used < least and observation.declared.prefixes.shares != "equal prefixes":
        return Finding(f"{problem}: some were freed too early", kind="freed early")
    return None


@invariant(rank=19, needs=("begin_receive", "table"))
def blocks_of_receives(observation: Observation) -> Finding | None:
    """A block that a transfer will write to must be its sequence's, and no free one."""
    transfers, receives = observation.after.transfers, remote_of(observation.oracle).receives
    if isinstance(transfers, Exception):
        return None
    ledger = observation.after.ledger(0) if observation.after.ledgers else None
    free = {*ledger.free} if ledger else set[int]()
    for each in transfers:
        for block in each.blocks:
            problem = f"block {block}, which transfer {each.id!r} will write to, is"
            location = location_of_block(observation, 0, block)
            if each.seq in receives and block not in observation.after.tables_of(0)[each.seq]:
                return Finding(f"{problem} not in the table of sequence {each.seq}", location)
            if others := [seq for seq in location.holders if seq != each.seq]:
                return Finding(f"{problem} in the table of sequence {others[0]}", location)
            if block in free:
                return Finding(f"{problem} free", location)
    return None
