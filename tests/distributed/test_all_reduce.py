"""Kernels of two processes add up rows through memory that they share, and models by them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import EnginePath
from roseinfer.distributed import peer_memory
from roseinfer.distributed.peer_memory import open_peer_buffers
from roseinfer.kernels.exchange import AllReduceBuffers
from roseinfer.kernels.triton.norm import add_rms_norm
from roseinfer.models.causal import CausalModel
from tests.python_process import run_python

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="two processes, and on a GPU each takes one of its own"
)

_SERVED = """
    import os, sys
    from dataclasses import replace
    from functools import partial
    from roseinfer import LLM, EnginePath
    from tests.distributed.rank_models import made
    from tests.distributed.test_sharded_models import PARAMS, PROMPTS, SIZES

    sizes = SIZES | dict(resident_decode=True, max_batch_size=4, prefill_max_tokens=9)
    prompts, params = [PROMPTS[0], PROMPTS[1], PROMPTS[4]], PARAMS[:3]
    params = [replace(each, max_new_tokens=4) for each in params]
    ways = dict(tensor_parallel_size=2, fused_model=True, exchange=True)

    def texts(llm):
        return [each.token_ids for each in llm.generate(prompts, params, progress=False)]

    for model in ("gpt2", "llama"):
        alone = texts(LLM(made("cpu", model), **sizes))
        shared = LLM(partial(made, model=model), **sizes, **ways)
        assert texts(shared) == alone, (model, texts(shared), alone)
        counts = shared.engine.path_counts
        print(model, counts[EnginePath.FUSED_ALL_REDUCE], counts[EnginePath.FUSED])
        shared.ranks.rank_connections.close()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.takes_long
def test_texts_are_those_of_one_process() -> None:
    """The leader of both models is one process, which takes seconds to start."""
    served = [line.split() for line in run_python(_SERVED, interpret=True).splitlines()]
    assert [model for model, _, _ in served] == ["gpt2", "llama"]
    for _, exchanged, forwards in served:
        assert int(exchanged) == int(forwards) > 3


ROWS, WIDTH, MOST = 3, 40, 5


def exchanges(ranks: int, together: int = 1) -> list[AllReduceBuffers]:
    """Make what all ranks have of an exchange, in this process."""
    size = 2, ranks, MOST, WIDTH // together
    boxes = [torch.zeros(size, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([box.data_ptr() for box in boxes])
    return [
        AllReduceBuffers(
            rank, ranks, together, MOST, boxes[rank], addresses,
            torch.zeros(MOST, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def words_of(numbers: torch.Tensor, stamp: int, together: int = 1) -> torch.Tensor:
    """Return what carries numbers, of 16 bits where two are in a word."""
    of_a_word = numbers if together == 2 else numbers.float()
    return of_a_word.view(torch.int32).long() & 0xFFFFFFFF | stamp << 32


def send(to: AllReduceBuffers, rank: int, numbers: torch.Tensor, stamp: int) -> None:
    """Write what another rank sends in a round."""
    to.inbox[stamp & 1, rank, : len(numbers)] = words_of(numbers, stamp, to.together)


def drawn(ranks: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return what each rank has of a sum, of sizes whose order shows in the sum's bits.

    In bfloat16 these are small whole numbers, for the interpreter does not round but cut them off.
    """
    torch.manual_seed(ranks)
    if dtype is torch.bfloat16:
        return [torch.randint(-4, 5, (2, ROWS, WIDTH)).float() for _ in range(ranks)]
    return [torch.randn(2, ROWS, WIDTH) * 7.0**rank / 1000 for rank in range(ranks)]


def added(
    exchange: AllReduceBuffers, own: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the residual stream, which was 0."""
    residual, gain = torch.zeros(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, dtype=dtype)
    add_rms_norm(residual, own, gain, 1e-6, exchange=exchange)
    return residual


def in_order(parts: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Add up what each rank has, rounded, and round the sum."""
    total = torch.zeros(ROWS, WIDTH)
    for part in parts:
        total += part.sum(0).to(dtype).float()
    return total.to(dtype)


def rounds(
    ranks: int,
    change: Callable[[AllReduceBuffers, int], AllReduceBuffers | None] = lambda *_: None,
    dtype: torch.dtype = torch.float32,
    together: int = 1,
) -> list[bool]:
    """Tell for each of four rounds if the last rank gets the bits of the ranks' sum in order.

    What the others send lies there before. Nobody waits, since ``gone`` says that they have ended.
    """
    right = []
    *others, own = exchanges(ranks, together)  # those of others are written to
    own.gone.fill_(1)
    for stamp in range(1, 5):
        parts = drawn(ranks, dtype)
        for rank, part in enumerate(parts[:-1]):
            send(own, rank, (part * stamp).sum(0).to(dtype), stamp)
        changed = change(own, stamp) or own
        want = in_order([part * stamp for part in parts], dtype)
        right.append(torch.equal(added(changed, parts[-1] * stamp, dtype), want))
    assert others[-1].inbox.any()
    return right


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_is_added_up_over_ranks_in_their_order(ranks: int, dtype: torch.dtype) -> None:
    assert all(rounds(ranks, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_numbers_of_16_bits_are_in_a_word(dtype: torch.dtype) -> None:
    assert all(rounds(3, dtype=dtype, together=2))
    first, second = exchanges(2, together=2)
    parts = drawn(2, dtype)
    first.gone.fill_(1)
    added(first, parts[0], dtype)
    assert torch.equal(second.inbox[1, 0, :ROWS], words_of(parts[0].sum(0).to(dtype), 1, 2))


def test_stamps_go_on_from_the_largest_number_to_the_smallest() -> None:
    """They do after 31 hours of 300 steps a second, each with 64 sums."""
    other, own = exchanges(2)
    parts = drawn(2)
    last = 2**31 - 1
    own.rounds.fill_(last - 1)
    for stamp in (last, -last - 1, -last):
        send(own, 0, parts[0].sum(0), stamp)
        assert torch.equal(added(own, parts[1]), in_order(parts))
        assert own.rounds.tolist()[:ROWS] == [stamp] * ROWS
        assert other.inbox[stamp & 1, 1, :ROWS].bitwise_right_shift(32).eq(stamp).all()


def test_what_is_sent_lies_in_the_others_inboxes() -> None:
    first, second = exchanges(2)
    parts = drawn(2)
    first.gone.fill_(1)
    added(first, parts[0])
    want = torch.zeros(MOST, WIDTH, dtype=torch.int64)
    want[:ROWS] = words_of(parts[0].sum(0), 1)
    assert torch.equal(second.inbox[1, 0], want)
    assert not second.inbox[0].any()
    assert not second.inbox[1, 1].any()
    assert not first.inbox.any()
    assert first.rounds.tolist() == [1] * ROWS + [0] * (MOST - ROWS)


def _misses_a_rank(own: AllReduceBuffers, stamp: int) -> None:
    own.inbox[stamp & 1, 0].zero_()


def _other_place(own: AllReduceBuffers, stamp: int) -> None:
    own.inbox[:] = own.inbox.flip(0) if stamp % 2 else own.inbox


def _other_order(own: AllReduceBuffers, stamp: int) -> AllReduceBuffers:  # noqa: ARG001
    """Add up what the last rank has before what the others have."""
    return replace(own, rank=0, inbox=own.inbox.roll(1, 1))


BUGS: dict[str, Callable[[AllReduceBuffers, int], AllReduceBuffers | None]]
BUGS = {"a rank": _misses_a_rank, "the place": _other_place, "the order": _other_order}


@pytest.mark.many_alike
@pytest.mark.parametrize("bug", BUGS)
def test_a_sum_that_is_wrong_in_one_of_them_is_seen(bug: str) -> None:
    assert not all(rounds(3, BUGS[bug]))


def test_a_kernel_waits_for_the_stamp_of_its_round() -> None:
    """It goes on when the words have come; those of two rounds ago lie there meanwhile."""
    _other, own = exchanges(2)
    parts = drawn(2)
    for stamp in (1, 2):
        send(own, 0, -parts[0].sum(0), stamp)
        added(own, parts[1])

    def come() -> None:
        time.sleep(0.3)
        send(own, 0, parts[0].sum(0), 3)

    thread = threading.Thread(target=come)
    thread.start()
    assert torch.equal(added(own, parts[1]), in_order(parts))
    thread.join()


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    _other, own = exchanges(2)
    peer_memory._exchange_aborter(own.gone)()
    added(own, drawn(2)[1])
    assert own.rounds.tolist()[:ROWS] == [1] * ROWS


class _Alone:
    """Stands for ranks of which there is one, who sends itself."""

    rank, size, device = 0, 1, torch.device("cpu")

    def __init__(self) -> None:
        self.on_abort: list[Any] = []

    def all_reduce_min(self, number: int) -> int:
        return number

    def broadcast(self, x: torch.Tensor) -> None:
        """Have what one has."""


def test_words_that_do_not_arrive_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = _Alone()
    opened = open_peer_buffers(ranks, 16)
    assert opened is not None
    assert opened.own.tolist() == [0] * 16
    write = peer_memory._write
    monkeypatch.setattr(peer_memory, "_write", lambda where, at, word: write(where, at, word + 1))
    assert open_peer_buffers(ranks, 16) is None


def test_more_rows_than_find_room_are_added_up_by_messages() -> None:
    """The ranks' own sum takes them, and nothing is counted."""
    small = replace(exchanges(2)[0], max_rows=4)
    model: Any = SimpleNamespace(exchange=small)
    attention: Any = SimpleNamespace(path_counts=Counter())
    assert CausalModel.all_reduce_for(model, 5, attention) is None
    assert not attention.path_counts
    assert CausalModel.all_reduce_for(model, 4, attention) is small
    assert attention.path_counts == {EnginePath.FUSED_ALL_REDUCE: 1}
