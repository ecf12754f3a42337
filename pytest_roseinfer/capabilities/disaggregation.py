"""Disaggregation: prompts are written to a prefill cache, and received from there.

The adapter's cache is the decode side. The harness writes prompts to the other side in chunks, ends
each transfer at a step of its choice with a result of its choice, and cancels and retries receives,
so that lost, repeated and late arrivals are steps of a history. Which layers and tokens a transfer
carries, and when it begins, are choices of the cache.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pytest_roseinfer.capabilities import operation, return_values
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    Run,
    SnapshotScope,
    Traits,
    View,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.misuse import Call, MisuseState, misuse
from pytest_roseinfer.capabilities.operation import add_while_fitting, call_or_error
from pytest_roseinfer.capabilities.remote_prompts import (
    Receive,
    Remote,
    RemoteShape,
    blocks_of_receives,
    prompt_tokens,
    receive_statuses,
    remote_blocks,
    remote_of,
    remote_prompts,
)
from pytest_roseinfer.capabilities.tiers import (
    DONE,
    FAILED,
    PART,
    RESULTS,
    TWICE,
    EndTransfer,
    end_with_result,
    list_transfers,
)
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import Transfer
    from pytest_roseinfer.capabilities.observation import Observation, Pair
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import TextSlice

ReceiveStatus = Literal["in flight", "done", "failed"]


@dataclass(frozen=True)
class RemoteTraits(Traits):
    """Prefill caches from which a cache can receive."""

    block_sizes: tuple[int, ...] = ()
    """Tokens per block that a prefill cache can have, other than those of the cache itself."""
    multiples: bool = False
    """True if the block size of one side must be a multiple of the other's."""
    larger_blocks: bool = True
    """False if the blocks of a prefill cache cannot be larger than those of the cache itself."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of ranks that a prefill cache can have. Each stores an equal share of the KV heads,
    in the order of the ranks."""
    while_prefilling: bool = True
    """True if a receive may begin before the last chunk of the prompt is written."""
    keeps_cancelled: bool = True
    """True if the prefill cache keeps a prompt whose receive is cancelled, so that the receive can
    begin again; False if the prompt ends with it."""


class DisaggregationMethods:
    """Adapter methods for disaggregation."""

    remote: ClassVar[RemoteTraits] = RemoteTraits()
    """Prefill caches from which a cache can receive."""

    @optional
    def make_remote(self, block_size: int, num_blocks: int, ranks: int) -> None:
        """Build an empty prefill cache, whose ranks each have this number of blocks.

        It has the layers and heads of the cache. It is called once, before the methods below.
        """

    @optional
    def remote_prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the next chunk of a prompt to the prefill cache.

        The first chunk of a name begins a prompt. It is only called if there is room. A receive of
        the prompt may have begun before.
        """

    @optional
    def begin_receive(self, seq: int, num_tokens: int) -> None:
        """Begin a sequence that receives its first ``num_tokens`` tokens from the prefill cache.

        These tokens are the whole prompt; the prefill cache may not have written all of them yet.
        The cache allocates blocks for all of them, which ``table`` shows from now on. Without room
        it raises one of ``full_errors`` and changes nothing. Blocks that this cache already has may
        be reused, as by ``prefill``. Until ``finish_receive``, no other method uses the sequence,
        and no lookup may find what it receives. ``transfers_in_flight`` lists the receive with the
        kind ``"receive"`` and the blocks that will be written; each transfer covers written tokens
        only.
        """

    @optional
    def poll_receive(self, seq: int) -> ReceiveStatus:
        """Return the status of a receive; called after each step, it changes nothing.

        ``"done"`` if all tokens have arrived in all layers, ``"failed"`` if some transfer failed
        and was not begun again, else ``"in flight"``. A receive that failed is cancelled.
        """

    @optional
    def finish_receive(self, seq: int) -> None:
        """End a receive that is done: its sequence now has the tokens of the prompt.

        The prefill cache keeps the prompt until the receive is done. When this call returns, it has
        freed the prompt's blocks, except those that transfers in flight may still read.
        """

    @optional
    def cancel_receive(self, seq: int) -> None:
        """Cancel a receive, and free its blocks; the prefill cache keeps the prompt.

        The receive may begin again. A transfer that was in flight is dropped and listed no more, or
        it stays in flight without a sequence, and its blocks are not free until it has ended.
        Unless ``RemoteTraits.keeps_cancelled``, the prompt ends, as by ``abort_remote``.
        """

    @optional
    def abort_remote(self, seq: int) -> None:
        """Drop a prompt from the prefill cache, which frees its blocks; cancel its receive, if any.

        Blocks that transfers in flight may still read are not free until these have ended.
        """

    @optional
    def peek_remote(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a prompt in the prefill cache, with the heads of all ranks.

        Their shapes are as in ``peek``.
        """

    @optional
    def remote_free_blocks(self) -> int:
        """Return the number of free blocks of the prefill cache, on each rank.

        Blocks that are free and kept for later prompts count too.
        """


# Operations


_NEEDS = frozenset({"begin_receive"})


@operation.register("MakeRemote")
class MakeRemote(operation.Operation):
    """Build the prefill cache."""

    block_size: int
    num_blocks: int
    ranks: int = 1

    needs = _NEEDS

    def describe(self) -> str:
        blocks = f"{self.num_blocks} blocks of {format_count(self.block_size, 'token')}"
        return f"build a prefill cache of {blocks} on {format_count(self.ranks, 'rank')}"

    def possible(self, oracle: Oracle) -> bool:
        return remote_of(oracle).shape is None

    def change(self, oracle: Oracle) -> None:
        remote_of(oracle).shape = RemoteShape(self.block_size, self.num_blocks, self.ranks)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.make_remote(self.block_size, self.num_blocks, self.ranks)

    @classmethod
    def draw_for(cls, writer: operation.Writer) -> MakeRemote:
        """Draw a prefill cache with room for as many tokens as the cache, or for more."""
        size, remote = writer.oracle.block_size, writer.adapter.remote
        sizes = [
            each
            for each in remote.block_sizes
            if each != size
            and not (remote.multiples and each % size and size % each)
            and (remote.larger_blocks or each < size)
        ]
        larger = [each for each in sizes if each > size]
        block_size = writer.pick([*sizes, *larger, size])
        blocks = -(-writer.oracle.capacity * size // block_size)
        heads = remote_of(writer.oracle).num_heads
        ranks = [each for each in remote.ranks if heads % each == 0]
        return cls(block_size, blocks + writer.pick((1, 3)), writer.pick(ranks[::-1]))

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if remote_of(writer.oracle).shape is None:
            yield operation.DrawOption(134, 2, lambda: cls.draw_for(writer))


@operation.register("RemotePrefill")
class RemotePrefill(operation.Operation):
    """Write the next chunk of a prompt to the prefill cache."""

    seq: int
    count: int
    layout: str = "plain"

    needs = _NEEDS

    def describe(self) -> str:
        tokens = format_count(self.count, "token")
        layout = "" if self.layout == "plain" else f" (inputs {self.layout})"
        return f"write {tokens} of sequence {self.seq} to the prefill cache{layout}"

    def possible(self, oracle: Oracle) -> bool:
        remote = remote_of(oracle)
        known = self.seq in remote.prompts
        unused = self.seq not in {*oracle.named, *oracle.pending_seqs}
        return (known or unused) and self.count <= remote.room(self.seq)

    def tokens(self, oracle: Oracle) -> list[int]:
        """Return the tokens that it is about to write."""
        begin = remote_of(oracle).prompts.get(self.seq, 0)
        return prompt_tokens(oracle, self.seq, begin, begin + self.count)

    def change(self, oracle: Oracle) -> None:
        prompts = remote_of(oracle).prompts
        prompts[self.seq] = prompts.get(self.seq, 0) + self.count

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.remote_prefill(self.seq, cache.key, cache.value)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        remote, new = remote_of(writer.oracle), -1
        prompts = list(remote.receives) or list(remote.prompts)
        if len(remote.prompts) < _MAX_PROMPTS:
            prompts = [new, *prompts]
        open_prompts = [seq for seq in prompts if remote.room(seq)]

        def draw_step() -> RemotePrefill:
            seq = writer.pick(open_prompts)
            count = writer.pick(_chunk_sizes(writer.oracle, seq))
            return cls(writer.fresh(1)[0] if seq == new else seq, count, writer.layout())

        if open_prompts:
            yield operation.DrawOption(135, 4, draw_step)


_MAX_PROMPTS = 3
"""Most prompts in the prefill cache of a drawn history."""


def _chunk_sizes(oracle: Oracle, seq: int) -> list[int]:
    """Return numbers of tokens to write that end near the boundaries of blocks of either side."""
    remote = remote_of(oracle)
    assert remote.shape
    written, room = remote.prompts.get(seq, 0), remote.room(seq)
    near = {1, 2} | ({room} if seq in remote.receives else set())
    for size in (oracle.block_size, remote.shape.block_size):
        ends = (-written % size, size - written % size, 2 * size)
        near |= {end + more for end in ends for more in (-1, 0, 1)}
    return sorted(count for count in near if 0 < count <= room)


class _OfReceive(operation.Operation):
    """An operation on one sequence of the prefill cache."""

    __slots__ = ()

    seq: int
    needs = _NEEDS

    def changed_seqs(self) -> list[int]:
        return [self.seq]


@operation.register("BeginReceive")
class BeginReceive(operation.Operation):
    """Begin a sequence that is received from the prefill cache."""

    seq: int
    count: int
    """Number of its tokens; the prefill cache may not have written all of them yet."""

    needs = _NEEDS

    def describe(self) -> str:
        tokens = format_count(self.count, "token")
        return f"begin to receive the {tokens} of sequence {self.seq}"

    def rows(self) -> operation.Rows:
        return [(self.seq, self.count)]

    def possible(self, oracle: Oracle) -> bool:
        remote = remote_of(oracle)
        written = remote.prompts.get(self.seq, 0)
        most = self.count if remote.while_prefilling else written
        return self.seq not in remote.receives and 0 < written <= self.count <= most

    def change(self, oracle: Oracle) -> None:
        remote = remote_of(oracle)
        oracle.append(self.rows(), prompt_tokens(oracle, self.seq, 0, self.count))
        retried, written = bool(remote.cancelled.get(self.seq)), remote.prompts[self.seq]
        remote.receives[self.seq] = Receive(self.count, written, retried)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.begin_receive(self.seq, self.count)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> BeginReceive:
            seq, size = writer.pick(prompts), writer.oracle.block_size
            more = writer.pick((0, 0, 1, size)) if remote.while_prefilling else 0
            return cls(seq, remote.prompts[seq] + more)

        remote = remote_of(writer.oracle)
        prompts = [*remote.pending_seqs]
        if prompts and len(writer.oracle.sequences) < operation.MAX_SEQUENCES:
            yield operation.DrawOption(136, 6, draw_step)


_DRAWN_RESULTS = (DONE, DONE, DONE, DONE, PART, TWICE, FAILED, PART)
"""Results of a transfer from the prefill cache, each as often as it is drawn."""


@operation.register("EndReceiveTransfer")
class EndReceiveTransfer(EndTransfer):
    """End a transfer from the prefill cache."""

    needs = _NEEDS

    def describe(self) -> str:
        return f"end transfer {self.number} from the prefill cache{RESULTS[self.result]}"

    def possible(self, oracle: Oracle) -> bool:
        return remote_of(oracle).num_in_flight > 0

    def drive(self, cache: operation.CacheUnderTest) -> object:
        coming = list_transfers(cache.adapter)
        return end_with_result(cache, coming[self.number % len(coming)], self.result, self.at)

    def settle(self, oracle: Oracle, answer: object) -> str | None:
        assert isinstance(answer, tuple)
        (transfer, result), _, problem = answer
        remote = remote_of(oracle)
        remote.lost = result.reported < transfer.num_blocks
        if receive := remote.receives.get(transfer.seq):
            receive.num_arrived += not remote.lost
            receive.num_lost += remote.lost
        return str(problem) if problem else None

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> EndReceiveTransfer:
            return cls(writer.between(0, 3), writer.pick(_DRAWN_RESULTS), writer.between(1, 3))

        remote = remote_of(writer.oracle)
        if remote.receives or remote.cancelled:
            yield operation.DrawOption(137, 8, draw_step)


@operation.register("FinishReceive")
class FinishReceive(_OfReceive):
    """End all transfers that a receive still waits for, and turn it into a sequence."""

    seq: int

    def describe(self) -> str:
        return f"end all transfers for sequence {self.seq}, and finish its receive"

    def possible(self, oracle: Oracle) -> bool:
        return remote_of(oracle).is_complete(self.seq)

    def restored_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: Oracle) -> None:
        remote_of(oracle).end_prompt(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> object:
        adapter = cache.adapter
        while coming := [each for each in list_transfers(adapter) if each.seq == self.seq]:
            problem = end_with_result(cache, coming[0], DONE, 0)[2]
            if problem:
                return problem
        status = _poll(adapter, self.seq)
        if status == "done":
            adapter.finish_receive(self.seq)
        return status

    def settle(self, oracle: Oracle, answer: object) -> str | None:  # noqa: ARG002
        if answer == "done":
            return None
        if answer in get_args(ReceiveStatus):
            status = f"poll_receive({self.seq}) returned {answer!r}"
            return f"all transfers for sequence {self.seq} have arrived, and {status}"
        return str(answer)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        remote = remote_of(writer.oracle)
        if complete := [seq for seq in remote.receives if remote.is_complete(seq)]:
            yield operation.DrawOption(138, 3, lambda: cls(writer.pick(complete)))


def _poll(adapter: Any, seq: int) -> str:
    status = adapter.poll_receive(seq)
    if status not in get_args(ReceiveStatus):
        right = "one of " + ", ".join(map(repr, get_args(ReceiveStatus)))
        return_values.raise_invalid(f"poll_receive({seq})", status, right)
    return str(status)


@operation.register("CancelReceive")
class CancelReceive(_OfReceive):
    """Cancel a receive; the prefill cache keeps the prompt, or it ends too."""

    seq: int

    def describe(self) -> str:
        return f"cancel the receive of sequence {self.seq}"

    def possible(self, oracle: Oracle) -> bool:
        return self.seq in remote_of(oracle).receives

    def change(self, oracle: Oracle) -> None:
        remote = remote_of(oracle)
        if not remote.keeps_cancelled:
            remote.end_prompt(self.seq)
            oracle.free(self.seq)
            return
        remote.cancelled[self.seq] = remote.receives.pop(self.seq).num_arrived
        oracle.release_pages(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.cancel_receive(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if seqs := [*remote_of(writer.oracle).receives]:
            yield operation.DrawOption(139, 2, lambda: cls(writer.pick(seqs)))


@operation.register("AbortRemote")
class AbortRemote(_OfReceive):
    """Drop a prompt from the prefill cache, and cancel its receive if it has one."""

    seq: int

    needs = _NEEDS | {"abort_remote"}

    def describe(self) -> str:
        return f"abort sequence {self.seq} in the prefill cache"

    def possible(self, oracle: Oracle) -> bool:
        return self.seq in remote_of(oracle).prompts

    def change(self, oracle: Oracle) -> None:
        remote_of(oracle).end_prompt(self.seq)
        oracle.free(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.abort_remote(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if prompts := [*remote_of(writer.oracle).prompts]:
            yield operation.DrawOption(140, 1, lambda: cls(writer.pick(prompts)))


# Views and observers


def _show_remote(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    if feeder := run.observer(Receives):
        feeder.overwrite_input()
    remote = remote_of(run.oracle)
    if remote.shape is None:
        return {}
    statuses = {seq: call_or_error(_poll, run.adapter, seq) for seq in remote.receives}
    shown: dict[str, Any] = {"receive_statuses": statuses}
    if "remote_free_blocks" in run.features:
        shown["remote_free_blocks"] = call_or_error(_count_free, run.adapter)
    if look.reads and "peek_remote" in run.features and run.cache_under_test.device.idle:
        shown["remote_reads"] = {
            (seq, layer): call_or_error(_peek, run.adapter, seq, layer)
            for seq in remote.prompts
            if statuses.get(seq) != "done"
            for layer in range(run.spec.num_layers)
        }
    return shown


def _count_free(adapter: Any) -> int:
    return return_values.count("remote_free_blocks()", adapter.remote_free_blocks())


def _peek(adapter: Any, seq: int, layer: int) -> Pair:
    call = f"peek_remote({seq}, {layer})"
    keys, values = return_values.pair(call, adapter.peek_remote(seq, layer))
    return keys.clone(), values.clone()


class Receives(Observer):
    """Feeder of prompts to the prefill cache, and counter of receives in different states."""

    any_of = ("begin_receive",)
    conditions: ClassVar = {
        "received_other_block_size": "A receive ends whose prefill cache has blocks of another "
        "size. Required of a cache that lists one in ``RemoteTraits.block_sizes``.",
        "received_other_ranks": "A receive ends whose prefill cache has several ranks. Required of "
        "a cache that lists them in ``RemoteTraits.ranks``.",
        "received_while_prefilling": "A receive ends that began before the last chunk of the "
        "prompt was written. Required unless ``RemoteTraits.while_prefilling`` is False.",
        "received_after_cancel": "A receive ends after an earlier one of the same prompt was "
        "cancelled half way. Required unless ``RemoteTraits.keeps_cancelled`` is False.",
        "transfer_lost": "A transfer of a receive fails, at least in part. Required of a cache "
        "that defines ``begin_receive``.",
        "write_during_receive": "Another sequence is written after some transfer of a receive, and "
        "before another one. Required of a cache that defines ``begin_receive``.",
        "block_reused_after_cancel": "A sequence gets a block of another one whose receive was "
        "cancelled; counted for each such block of the first layer. Required of a cache that "
        "defines ``begin_receive`` and ``table``.",
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._finishing: Receive | None = None
        """The receive that the present step finishes."""
        self._given: list[torch.Tensor] = []
        """Tensors that the cache got for the present step."""
        self._left: dict[int, int] = {}
        """Blocks of cancelled receives that no sequence got since, with their sequence."""

    def before(self, step: operation.Operation) -> Mapping[str, int]:
        remote = remote_of(self.run.oracle)
        self._finishing = None
        if isinstance(step, FinishReceive):
            self._finishing = remote.receives.get(step.seq)
        return {}

    def before_call(self, step: operation.Operation, text_slices: Sequence[TextSlice]) -> None:  # noqa: ARG002
        if not isinstance(step, RemotePrefill):
            return
        # The oracle has the tokens already.
        end = remote_of(self.run.oracle).prompts[step.seq]
        tokens = prompt_tokens(self.run.oracle, step.seq, end - step.count, end)
        for token in tokens:
            self.run.first_writers.setdefault(token, step.seq)
        cache = self.run.cache_under_test
        self._given = self.run.payload.inputs(tokens, step.layout)
        cache.key, cache.value = self._given
        cache.device.hand_over(*self._given)

    def overwrite_input(self) -> None:
        """Overwrite the tensors that the cache got, in case it keeps them."""
        for tensor in self._given:
            self.run.cache_under_test.device.overwrite(tensor)
        self._given = []

    def after(self, observation: Observation) -> Mapping[str, int]:
        remote, transfers = remote_of(observation.oracle), observation.after.transfers
        assert not isinstance(transfers, Exception)
        counts = Counter(self._conditions(observation, remote, transfers))
        for seq, status in observation.after.receive_statuses.items():
            remote.receives[seq].failed |= status == "failed"
        owned = {*observation.after.owners(0)} if observation.after.tables else set[int]()
        remote.held = len(observation.after.blocks_in_flight.keys() - owned)
        remote.num_in_flight = len(transfers)
        remote.num_leaving *= bool(transfers)
        remote.lost = False
        counts["block_reused_after_cancel"] = self._count_reused_blocks(observation)
        return counts

    def _conditions(
        self, observation: Observation, remote: Remote, transfers: Sequence[Transfer]
    ) -> Iterator[str]:
        """Yield the conditions that a step met."""
        if (receive := self._finishing) and remote.shape:
            if remote.shape.block_size != observation.spec.block_size:
                yield "received_other_block_size"
            if remote.shape.ranks > 1:
                yield "received_other_ranks"
            if receive.num_written < receive.num_tokens:
                yield "received_while_prefilling"
            if receive.retried:
                yield "received_after_cancel"
        if remote.lost:
            yield "transfer_lost"
        if observation.outcome.written:
            coming = {each.seq for each in transfers}
            if any(
                receive.num_arrived for seq, receive in remote.receives.items() if seq in coming
            ):
                yield "write_during_receive"

    def _count_reused_blocks(self, observation: Observation) -> int:
        """Count the blocks of cancelled receives that another sequence got in this step."""
        if observation.after.tables is None:
            return 0
        step = observation.operation
        if isinstance(step, CancelReceive):
            blocks = observation.before.tables_of(0)[step.seq]
            self._left |= {block: step.seq for block in blocks if block is not None}
        reused = {
            (block, seq)
            for seq, table in observation.after.tables_of(0).items()
            for block in table
            if block is not None and block in self._left
        }
        others = {block for block, seq in reused if self._left[block] != seq}
        self._left = {each: self._left[each] for each in self._left.keys() - {*dict(reused)}}
        return len(others)


def _required_conditions(adapter: type[Any]) -> list[str]:
    """Return the conditions that are required of a cache that receives prompts."""
    if not adapter.abilities >= _NEEDS:
        return []
    remote = adapter.remote
    met: Mapping[str, object] = {
        "received_other_block_size": remote.block_sizes,
        "received_other_ranks": max(remote.ranks) > 1,
        "received_while_prefilling": remote.while_prefilling,
        "received_after_cancel": remote.keeps_cancelled,
        "transfer_lost": True,
        "write_during_receive": True,
        "block_reused_after_cancel": "table" in adapter.abilities,
    }
    return [name for name, required in met.items() if required]


# Bad calls


@misuse("gather", "begin_receive")
def gather_being_received(at: MisuseState) -> Iterator[Call]:
    for seq in [*remote_of(at.oracle).receives][-1:]:
        call = partial(at.adapter.gather, seq, at.last)
        yield "gather of a sequence that is being received", call


@misuse("begin_receive")
def append_to_being_received(at: MisuseState) -> Iterator[Call]:
    new = at.tokens(1)
    for seq in [*remote_of(at.oracle).receives][-1:]:
        call = partial(at.adapter.append, [seq], new, new)
        yield "append to a sequence that is being received", call


# Prelude


def _open(writer: operation.Writer) -> None:
    """Open with a prefill cache and, mostly, prompts that are received from it."""
    writer.take(MakeRemote.draw_for(writer))
    if writer.between(0, 7):
        add_while_fitting(writer, _receive(writer))


def _receive(writer: operation.Writer) -> Iterator[operation.Operation]:
    """Yield the receive of one prompt, or of two, with others' writes and a cancel in between."""
    remote, oracle = remote_of(writer.oracle), writer.oracle
    if Free.needs <= writer.adapter.abilities and writer.between(0, 2):
        yield from map(Free, writer.live)
    if not oracle.pages_free():
        return
    seq, other, third = writer.fresh(3)
    tokens = _draw_prompt_length(writer, seq)
    early = tokens > 1 and remote.while_prefilling and writer.between(0, 1)
    chunk = _draw_chunk(writer, tokens, least_left=bool(early))
    yield RemotePrefill(seq, chunk, writer.layout())
    if chunk < tokens and not early:
        yield RemotePrefill(seq, tokens - chunk, writer.layout())
    if (step := RemotePrefill(other, min(tokens, oracle.block_size))).possible(oracle):
        yield step
    yield BeginReceive(seq, tokens)
    if writer.between(0, 2) == 0 and other in remote.prompts:
        yield BeginReceive(other, remote.prompts[other])
    if writer.between(0, 1):
        yield EndReceiveTransfer(0, DONE)
        yield Append((third,), writer.layout())
    yield from _end_some(writer)
    if early and (missing := remote.missing(seq)):
        yield RemotePrefill(seq, missing, writer.layout())
        yield from _end_some(writer)
    if writer.between(0, 1):
        yield CancelReceive(seq)
        yield from _meanwhile(writer)
        if not remote.keeps_cancelled:
            return
        yield BeginReceive(seq, tokens)
        yield from _end_some(writer)
    if remote.is_complete(seq):
        yield FinishReceive(seq)
        yield Append((seq,), writer.layout())


def _draw_prompt_length(writer: operation.Writer, seq: int) -> int:
    """Draw the number of tokens of a prompt, near the boundaries of blocks of either side."""
    remote, size = remote_of(writer.oracle), writer.oracle.block_size
    assert remote.shape
    sizes = size, remote.shape.block_size
    blocks = max(1, writer.oracle.pages_free() - writer.pick((1, 1, 0)))  # one is for another
    most = min(blocks * size, remote.room(seq), 4 * max(sizes))
    ends = {each * blocks for each in sizes for blocks in (1, 2)}
    near = {end + more for end in ends for more in (-1, 0, 1)}
    return writer.pick([*sorted(each for each in near if 0 < each <= most), most, most])


def _draw_chunk(writer: operation.Writer, tokens: int, *, least_left: int) -> int:
    """Draw the number of tokens in the first chunk of a prompt; ``least_left`` follow, or more."""
    shape, size = remote_of(writer.oracle).shape, writer.oracle.block_size
    assert shape
    most = tokens - least_left
    ends = {1, size, shape.block_size, most, most - most % shape.block_size}
    return writer.pick(sorted(each for each in ends if 0 < each <= most))


def _end_some(writer: operation.Writer) -> Iterator[operation.Operation]:
    """Yield steps that end up to five transfers; most of these arrive."""
    for _ in range(writer.between(0, 5)):
        result = writer.pick(_DRAWN_RESULTS)
        yield EndReceiveTransfer(writer.pick((0, 0, 1, 2)), result, writer.between(1, 3))


def _meanwhile(writer: operation.Writer) -> Iterator[operation.Operation]:
    """Yield writes of others to the free blocks, during which transfers arrive late."""
    oracle = writer.oracle
    if not (free := oracle.pages_free()) or not writer.between(0, 3):
        return
    if Prefill.needs <= writer.adapter.abilities and writer.between(0, 1):
        seqs = writer.fresh(1)
        yield Prefill(seqs[0], free * oracle.block_size, writer.layout())
    else:
        seqs = writer.fresh(min(free, operation.MAX_SEQUENCES - len(oracle.sequences)))
        yield Append(seqs, writer.layout())
    for _ in range(writer.between(0, 3)):
        yield EndReceiveTransfer(0, DONE)
    if Free.needs <= writer.adapter.abilities:
        yield from map(Free, seqs)


def _finishing_steps(oracle: Oracle) -> list[operation.Operation]:
    remote = remote_of(oracle)
    return [FinishReceive(seq) for seq in remote.receives if remote.is_complete(seq)]


_REFUSED_WITH = ("reset", "use_states", "load_prefix")
"""Methods of capabilities that move or change what a receive carries."""


def refuse_disaggregation(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for declarations about prefill caches that cannot be judged."""
    name, remote = adapter.__name__, adapter.remote
    if "begin_receive" in adapter.abilities:
        others = [each for each in _REFUSED_WITH if each in adapter.abilities]
        others += ["windows"] * (adapter.windows.groups > 0)
        others += ["tolerance"] * bool(adapter.tolerance)
        if others:
            raise TypeError(
                f"{name} defines begin_receive, which cannot be judged with {others[0]} yet"
            )
    for attribute in ("block_sizes", "ranks"):
        sizes = getattr(remote, attribute)
        listed = isinstance(sizes, tuple) and all(type(e) is int and e > 0 for e in sizes)
        if not listed or (attribute == "ranks" and 1 not in sizes):
            example = "(1, 2)" if attribute == "ranks" else "(8, 32)"
            raise TypeError(
                f"{name}.remote.{attribute} is {sizes!r}: write numbers of 1 or more, as in "
                f"{example}"
            )


_WITH_RECEIVES = (
    "make_remote",
    "remote_prefill",
    "poll_receive",
    "finish_receive",
    "cancel_receive",
)
_OF_PROMPTS = ("abort_remote", "peek_remote", "remote_free_blocks")

DISAGGREGATION = Capability(
    methods=DisaggregationMethods,
    states=(Remote,),
    preludes=(Prelude(("begin_receive",), 13, _open),),
    operations=(
        MakeRemote,
        RemotePrefill,
        BeginReceive,
        EndReceiveTransfer,
        FinishReceive,
        CancelReceive,
        AbortRemote,
    ),
    finishing_steps=_finishing_steps,
    needs={
        "begin_receive": (*_WITH_RECEIVES, "transfers_in_flight", "end_transfer"),
        **dict.fromkeys((*_WITH_RECEIVES, *_OF_PROMPTS), ("begin_receive",)),
    },
    invariants=(receive_statuses, remote_prompts, blocks_of_receives, remote_blocks),
    observers=(Receives,),
    required_conditions=_required_conditions,
    views=(View(("begin_receive",), _show_remote),),
    refuse=(refuse_disaggregation,),
    misuse=(gather_being_received, append_to_being_received),
)
