"""The one class a downstream user writes: how the harness drives somebody's KV cache."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.base import Adapter, optional
from pytest_roseinfer.capabilities.cache_data import CacheFull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import (
        BadCall,
        CacheSpec,
        FastPath,
        Ledger,
        Tolerance,
    )
    from pytest_roseinfer.capabilities.device_queue import DeviceQueue


class KVCacheAdapter(Adapter):
    """Override ``make``, ``append`` and ``peek``; everything else is optional.

    Sequences are named by integers of the harness's choosing; a name never seen before, or
    freed since, is an empty sequence. Tensors are ``[layers, tokens, heads, head_dim]``.

    An optional method is tested when it is overridden; ``reserve`` goes with ``fill``, ``preempt``
    with ``resume``, and the four of swapping with each other. All stand in the order in which one
    would add them to a cache.
    """

    full_errors: ClassVar[tuple[type[BaseException], ...]] = (CacheFull,)
    """The errors that ``append`` and others raise, changing nothing, when there is no room."""
    fork_shares: ClassVar[str] = "blocks"
    """A fork shares all its ``"blocks"``, and a partial one is copied when it is written to; or
    only its ``"full blocks"``, and a partial one is copied at once; or ``"nothing"``."""
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Switches to vary: each history draws a value for every name, for ``spec.options``."""
    paths: ClassVar[Mapping[str, FastPath]] = {}
    """Fast paths the cache declares, by their names in ``path_counts``."""
    conditions: ClassVar[Sequence[str]] = ()
    """Names in ``path_counts`` that are no paths but must be met all the same.

    The harness counts some itself, which ``path_counts`` leaves out: "last_position", a row that
    begins at the last position of its block; "out_of_room_mid_batch", a refused write whose first
    row alone would have found room (which needs a ``ledger``); "name_used_again", a sequence
    that begins under the name of one that was freed; "slot_used_again" and "list_used_again", one
    that begins in what ``kept_in`` showed of another; "handle_used_again", a ``reserve`` that
    returns what one before it had returned, which was filled since; and "block_used_while_away",
    a block that another gets before the sequence is back that had given it up."""
    row_conditions: ClassVar[Mapping[str, str]] = {}
    """Which of ``conditions`` counts what a row found: a name for each of "fresh", "in_place",
    "rollover", "rollover_shared", "copy_on_write" and "padding" that is counted row by row."""
    scratch_blocks: frozenset[int] = frozenset()
    """Blocks of ``arena`` that no sequence owns and padding may write to; ``make`` may set it."""
    truncate_copies: ClassVar[bool] = False
    """Where ``truncate`` cuts a block that others hold, the part that is kept is copied at once;
    else the block stays shared until it is written to. A sequence that alone holds a block keeps
    it. Blocks that are given back make room for the copy, and for those of later rows."""
    untrimmable_errors: ClassVar[tuple[type[BaseException], ...]] = ()
    """The errors that ``truncate`` raises, changing nothing, where ``trimmable`` returns False."""
    sharing: ClassVar[str] = "exact"
    """Sequences share blocks where ``fork`` says so, ``"exact"``; or, where the cache is told
    their ``texts``, may share any whose tokens and all before them are equal, ``"equal
    prefixes"``; or never, ``"none"``."""
    match_granularity: ClassVar[str] = "block"
    """``matched`` finds whole blocks, ``"block"``, or also a part of one, ``"token"``."""
    match_leaves: ClassVar[int] = 0
    """Of a text it never finds so many of the last tokens: 1 where one must be left to compute."""
    match_finds: ClassVar[str] = "all"
    """It finds ``"all"`` that is stored of a text, or ``"some"`` of it."""
    evicts: ClassVar[str] = "any"
    """Where a block is needed, any of those that a ledger has as ``cached`` is given up, or the
    ``"least recent"``: the one whose last holder let go of it longest ago, and of those that one
    sequence let go of at once, that nearest to its end. Looking one up does not renew it; a
    sequence that begins with it does, as soon as it lets go."""
    keeps_found: ClassVar[bool] = False
    """What ``begin_with`` found stays to be found as long as the sequence holds it: where it writes
    into a block of that, or cuts one, the block counts as one that others hold. So who appends to a
    partial block gets a copy, for which there must be room, though nobody else has the block."""
    swap_out_holds: ClassVar[bool] = True
    """The blocks of a sequence are its own until ``swapped_out``. False where they are free as soon
    as ``swap_out`` returns, since they were copied by then."""
    gather_in_flight: ClassVar[bool] = False
    """Where the cache has a queue: ``gather`` may be called while the device has not done what it
    was asked for. It waits for what it returns, or returns tensors of the device's."""
    atomic_batches: ClassVar[bool] = True
    """An append that finds no room for all its rows stores none. False for a cache that admits row
    by row, as vLLM's scheduler does: the rows ahead of the first that finds no room are stored, and
    neither that one nor any behind it. It raises one of ``full_errors`` all the same. ``reserve``
    stays all or nothing, since its answer stands for all rows."""
    window_groups: ClassVar[int] = 0
    """Up to so many different windows are drawn for ``spec.windows``, no window counting as one:
    the groups of layers that the cache can be built with. In a layer of window W a token attends to
    itself and the W - 1 before it. So of what is stored the last W - 1 tokens are live: ``peek``
    and ``gather`` return these alone, ``attend`` attends to them, and ``table`` has None for a
    block that was given back, all of whose tokens come before them."""
    window_pools: ClassVar[str] = "own"
    """Each layer has blocks of its ``"own"``, ``spec.num_blocks`` of them; or all groups take them
    from one pool, ``"shared"``: a block is then one group's at a time, layers of a group have the
    same table, and a ledger shows the whole pool, whichever layer is asked for."""
    window_gives_back: ClassVar[str] = "at once"
    """A block that left the window is given back ``"at once"``, by the write that moved it out and
    when that is stored, or by the sequence's ``"next write"``. That makes room for the write's own
    row and for later ones; a write that is refused gives nothing back. With ``"next try"`` the row
    that found no room has given back all the same, as in vLLM."""
    tolerance: ClassVar[Mapping[str, Tolerance]] = {}
    """For each of ``dtypes`` that is quantised, under any name: how far what is read back may be
    off. All else must come back bit for bit."""
    dtypes: ClassVar[Sequence[str]] = ("float32", "float16", "bfloat16")
    """Dtypes the cache can be built with."""
    head_counts: ClassVar[Sequence[int]] = (1, 2, 3, 40)
    """Numbers of KV heads the cache can be built with, drawn for ``spec.num_heads``."""
    head_dims: ClassVar[Sequence[int]] = (4, 1, 5, 8, 64, 80, 96, 128, 256)
    """Head sizes the cache can be built with. Small ones are drawn most, and large ones with few
    heads and short blocks as far as there are any."""
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3, 5, 8, 16, 128)
    """Numbers of tokens in a block that the cache can be built with."""
    most_sequences: ClassVar[int | None] = None
    """How many sequences the cache is made for at a time, where slots or a kernel bound them; None
    if nothing does. Histories have more than 6 only to see that many rows do no harm."""
    most_tokens: ClassVar[int | None] = None
    """How many tokens of one sequence it is made for, if not for as many as its blocks hold."""
    standard_bad_calls: ClassVar[Sequence[str]] = ()
    """Names from the catalogue of bad calls: those that the cache must refuse."""
    bad_call_errors: ClassVar[tuple[type[BaseException], ...]] = (Exception,)
    """What it refuses them with."""

    def make(self, spec: CacheSpec) -> None:
        """Build an empty cache of this shape."""
        raise NotImplementedError(f"{type(self).__name__} must define make(spec)")

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Append token ``i`` of ``[layers, len(seqs), heads, head_dim]`` to ``seqs[i]``.

        Where an adapter defines ``append_many``, that does for this, with a token of each.
        """
        if not self.defines("append_many"):
            raise NotImplementedError(f"{type(self).__name__} must define append(seqs, key, value)")
        self.append_many(seqs, [1] * len(seqs), key, value)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is stored for a sequence in one layer, ``[tokens, heads, head_dim]`` each.

        Read it by another route than the cache's own if there is one.
        """
        raise NotImplementedError(f"{type(self).__name__} must define peek(seq, layer)")

    @optional
    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        """Return the blocks of a sequence, as indices into ``arena``'s block dimension.

        None stands for a block that was given back since it left the layer's window.
        """

    @optional
    def ledger(self, layer: int) -> Ledger:
        """Return the cache's own books for one layer."""

    @optional
    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the cache itself returns for a sequence, shaped as in ``peek``."""

    @optional
    def fork(self, parent: int, child: int) -> None:
        """Start ``child`` as a copy of ``parent``, sharing what can be shared."""

    @optional
    def free(self, seq: int) -> None:
        """Forget a sequence; its name is used again for new ones.

        It may be preempted, swapped out, or half way out or back. That is over then, too: what was
        returned for it is handed to nobody, and all that it held is free.
        """

    @optional
    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Start a new sequence with a whole prompt."""

    @optional
    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> object:
        """Make room for ``counts[i]`` more tokens of ``seqs[i]``, to be written later.

        What it returns is handed to ``fill``. Until then the sequences are left alone.
        """

    @optional
    def fill(self, reservation: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the tokens room was made for."""

    @optional
    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append ``counts[i]`` tokens to ``seqs[i]``; a sequence's tokens lie together."""

    @optional
    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """As ``append``, but a row whose sequence is None is padding and belongs to nobody."""

    @optional
    def set_options(self, options: Mapping[str, Any]) -> None:
        """Change the switches of a live cache."""

    @optional
    def path_counts(self) -> Mapping[str, int]:
        """Return how often each path ran and each condition was met since ``make``."""

    @optional
    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend with one token of each sequence over all that is stored for it; store nothing.

        The query and the result are ``[len(seqs), q_heads, head_dim]`` in the cache's dtype;
        scores are scaled by ``head_dim ** -0.5``. ``q_heads`` is ``n`` times the cache's heads,
        ``n`` up to 16: query head ``h`` attends to head ``h // n``.
        """

    @optional
    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[layers, blocks, heads, block_size, head_dim]`` views of the live storage."""

    @optional
    def kept_in(self, seq: int) -> int | list[Any]:
        """Return what a sequence has until it is freed or away, and another may get after it.

        That is the number of its slot, or the list that the cache keeps its blocks in: the list
        itself and no copy. No two sequences may have the same.
        """

    @optional
    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence, which may be none or all of them.

        One that is cut to nothing is not freed: it reads back as empty, and can be appended to.
        """

    @optional
    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Truncate ``seqs[i]`` to ``lengths[i]``, one after the other; all of them or none."""

    @classmethod
    def trimmable(cls, spec: CacheSpec, stored: int, length: int) -> bool:  # noqa: ARG003
        """Return False if a cache built so cannot cut ``stored`` tokens to ``length``.

        It says so of all histories alike: nothing but these numbers may matter.
        """
        return True

    @optional
    def texts(self, said: Sequence[Sequence[int]]) -> None:
        """Hear what the tokens say that are written next, or that room is reserved for next.

        A row for each sequence, in the order of the write, padding left out; ``[5, 3]`` where two
        tokens are appended. What is stored for a token follows from what its sequence says up to
        there, so equal beginnings store the same. A fork says what its parent does.
        """

    @optional
    def matched(self, said: Sequence[int]) -> int:
        """Count the first tokens of a text that are stored, so that a sequence could begin there.

        Asking takes nothing and changes nothing.
        """

    @optional
    def look_up(self, said: Sequence[int]) -> object:
        """Look up a text for a sequence that begins later; what is returned goes to ``begin_with``.

        Nothing is held by it: until then, others may take what was found.
        """

    @optional
    def begin_with(self, found: Any, seq: int) -> int:
        """Begin ``seq`` with what was found, as far as it is still there; count its tokens."""

    @optional
    def namespaces(self, names: Sequence[int]) -> None:
        """Hear in which namespace each row of ``texts`` lies that comes next, or the text that is
        looked up next, by ``matched`` or ``look_up``.

        That is an adapter of the model's weights, say, or a salt. Equal texts in two namespaces
        store different things, and one is not found where the other is looked up. A fork lies in
        the namespace of its parent.
        """

    @optional
    def use_hash(self, hashed: Callable[[object], int]) -> None:
        """Hash with this function, called after ``make``: different things often hash alike."""

    @optional
    def preempt(self, seq: int) -> None:
        """Give up the blocks of a sequence, which ``resume`` or ``free`` is called with next."""

    @optional
    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write all tokens of a sequence again that was preempted, as it had them."""

    @optional
    def swap_out(self, seq: int) -> object:
        """Begin to copy a sequence out of the cache; what it returns goes to ``swapped_out``.

        Until then the sequence reads back as before, and nothing is done to it but ``free``. Swap
        space for ``spec.num_blocks`` blocks of each layer is enough.
        """

    @optional
    def swapped_out(self, leaving: Any) -> None:
        """Make sure that the copy is done; from here on the sequence holds no block.

        Blocks that others hold are copied too. They stay with the others, with a holder less.
        """

    @optional
    def swap_in(self, seq: int) -> object:
        """Take blocks for a sequence and begin to copy it back; returns what ``swapped_in`` gets.

        They are in its ``table`` from here on, none of them shared. It is not read until then.
        """

    @optional
    def swapped_in(self, coming: Any) -> None:
        """Make sure that the copy is done; the sequence reads back as before it was swapped out."""

    @optional
    def use_queue(self, queue: DeviceQueue) -> None:
        """Have this simulated device do, called after ``make``, what a GPU would do.

        Either submit calls to it, or name the tensors whose operations it is to hold back. It does
        them later: when it is waited for, or when the history says so. A block's number, a length,
        a count are known at once, so ``table``, ``ledger`` and the like are asked at any time;
        ``peek`` and ``gather`` are called when the device has done all, but for
        ``gather_in_flight``. Tensors that are handed over are the device's, and are overwritten on
        its first stream, behind what was submitted there.
        """

    @optional
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return live views of a quantised cache's scales, those of keys and those of values.

        They are ``[layers, blocks, heads, block_size]``, or ``[layers, blocks, heads]`` where all
        tokens of a block have one scale; where all heads have one, ``heads`` is 1. Those of a block
        that nobody holds become NaN: leave this out if they are reset when a block is freed.
        """

    @optional
    def shards(self) -> Sequence[KVCacheAdapter]:
        """Return the caches of all ranks, each of which keeps some of the heads.

        What is offered of tables and books is rank 0's; that of the others must be the same. Poison
        goes to their arenas, so that ``arena`` may be a copy. A ``ShardedAdapter`` has all this.
        """

    @optional
    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Take a holder off each of these blocks, which are as in ``table``.

        This one and the three below are there to be misused, by ``standard_bad_calls``.
        """

    @optional
    def incref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Add a holder to each of these blocks."""

    @optional
    def gather_blocks(self, layer: int, blocks: list[int], length: int | None) -> object:
        """Read the first ``length`` tokens of these blocks, or all that they store."""

    @optional
    def append_to_blocks(
        self, layer: int, lists: list[list[int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append a token to each of some lists of blocks, which is ``append`` without names."""

    @optional
    def bad_calls(self) -> Iterable[BadCall]:
        """Make up calls that must be refused, or leave no trace, in the cache's present state."""
