"""All-reduce kernels of two processes in shared memory, alone and in models."""

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
from roseinfer.kernels.triton.all_reduce import AllReduceBuffers
from roseinfer.kernels.triton.norm import add_rms_norm
from roseinfer.models.causal import CausalModel
from tests.python_process import run_python

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs two processes, each of which would take a GPU"
)

_SERVED = """
    import os, sys
    from dataclasses import replace
    from functools import partial
    from roseinfer import LLM, EnginePath
    from tests.distributed.rank_models import build_on
    from tests.distributed.test_sharded_models import PARAMS, PROMPTS, SIZES

    sizes = SIZES | dict(resident_decode=True, max_batch_size=4, prefill_max_tokens=9)
    prompts, params = [PROMPTS[0], PROMPTS[1], PROMPTS[4]], PARAMS[:3]
    params = [replace(each, max_new_tokens=4) for each in params]
    ways = dict(tensor_parallel_size=2, fused_model=True, exchange=True)

    def texts(llm):
        return [each.token_ids for each in llm.generate(prompts, params, progress=False)]

    for model in ("gpt2", "llama"):
        alone = texts(LLM(build_on("cpu", model), **sizes))
        shared = LLM(partial(build_on, model=model), **sizes, **ways)
        assert texts(shared) == alone, (model, texts(shared), alone)
        counts = shared.engine.path_counts
        print(model, counts[EnginePath.FUSED_ALL_REDUCE], counts[EnginePath.FUSED])
        shared.ranks.rank_connections.close()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
def test_completions_match_one_process() -> None:
    """One process leads both models, since it takes seconds to start."""
    served = [line.split() for line in run_python(_SERVED, interpret=True).splitlines()]
    assert [model for model, _, _ in served] == ["gpt2", "llama"]
    for _, exchanged, forwards in served:
        assert int(exchanged) == int(forwards) > 3


ROWS, WIDTH, MAX_ROWS = 3, 40, 5


def make_buffers(ranks: int, per_word: int = 1) -> list[AllReduceBuffers]:
    """Make the buffers of all ranks in this process."""
    size = 2, ranks, MAX_ROWS, WIDTH // per_word
    inboxes = [torch.zeros(size, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([inbox_of_rank.data_ptr() for inbox_of_rank in inboxes])
    return [
        AllReduceBuffers(
            rank, ranks, per_word, MAX_ROWS, inboxes[rank], addresses,
            torch.zeros(MAX_ROWS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def words_of(numbers: torch.Tensor, stamp: int, per_word: int = 1) -> torch.Tensor:
    """Return the words that carry numbers, two per word if they have 16 bits."""
    packed = numbers if per_word == 2 else numbers.float()
    return packed.view(torch.int32).long() & 0xFFFFFFFF | stamp << 32


def send(to: AllReduceBuffers, rank: int, numbers: torch.Tensor, stamp: int) -> None:
    """Write what another rank sends in a round."""
    to.inbox[stamp & 1, rank, : len(numbers)] = words_of(numbers, stamp, to.values_per_word)


def draw_parts(ranks: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Draw the partial sums of each rank, of sizes whose order shows in the bits of the sum.

    In bfloat16 these are small integers, since the interpreter truncates instead of rounding.
    """
    torch.manual_seed(ranks)
    if dtype is torch.bfloat16:
        return [torch.randint(-4, 5, (2, ROWS, WIDTH)).float() for _ in range(ranks)]
    return [torch.randn(2, ROWS, WIDTH) * 7.0**rank / 1000 for rank in range(ranks)]


def reduce_rows(
    exchange: AllReduceBuffers, own: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the residual stream, which was 0."""
    residual, gain = torch.zeros(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, dtype=dtype)
    add_rms_norm(residual, own, gain, 1e-6, exchange=exchange)
    return residual


def sum_in_order(parts: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Add the rounded partial sums of the ranks, and round the sum."""
    total = torch.zeros(ROWS, WIDTH)
    for part in parts:
        total += part.sum(0).to(dtype).float()
    return total.to(dtype)


def run_rounds(
    ranks: int,
    change: Callable[[AllReduceBuffers, int], AllReduceBuffers | None] = lambda *_: None,
    dtype: torch.dtype = torch.float32,
    per_word: int = 1,
) -> list[bool]:
    """Return for each of four rounds if the last rank gets the bits of the sum in rank order.

    The words of other ranks are written before. The kernel does not wait, since ``gone`` marks the
    other ranks as ended.
    """
    correct = []
    *others, own = make_buffers(ranks, per_word)  # buffers of other ranks are written to
    own.gone.fill_(1)
    for stamp in range(1, 5):
        parts = draw_parts(ranks, dtype)
        for rank, part in enumerate(parts[:-1]):
            send(own, rank, (part * stamp).sum(0).to(dtype), stamp)
        used = change(own, stamp) or own
        expected = sum_in_order([part * stamp for part in parts], dtype)
        correct.append(torch.equal(reduce_rows(used, parts[-1] * stamp, dtype), expected))
    assert others[-1].inbox.any()
    return correct


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_row_is_summed_in_rank_order(ranks: int, dtype: torch.dtype) -> None:
    assert all(run_rounds(ranks, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_16_bit_numbers_share_a_word(dtype: torch.dtype) -> None:
    assert all(run_rounds(3, dtype=dtype, per_word=2))
    first, second = make_buffers(2, per_word=2)
    parts = draw_parts(2, dtype)
    first.gone.fill_(1)
    reduce_rows(first, parts[0], dtype)
    assert torch.equal(second.inbox[1, 0, :ROWS], words_of(parts[0].sum(0).to(dtype), 1, 2))


def test_stamps_wrap_around() -> None:
    """This happens after 31 hours of 300 steps per second, each with 64 sums."""
    other, own = make_buffers(2)
    parts = draw_parts(2)
    last = 2**31 - 1
    own.rounds.fill_(last - 1)
    for stamp in (last, -last - 1, -last):
        send(own, 0, parts[0].sum(0), stamp)
        assert torch.equal(reduce_rows(own, parts[1]), sum_in_order(parts))
        assert own.rounds.tolist()[:ROWS] == [stamp] * ROWS
        assert other.inbox[stamp & 1, 1, :ROWS].bitwise_right_shift(32).eq(stamp).all()


def test_words_are_sent_to_the_inboxes_of_other_ranks() -> None:
    first, second = make_buffers(2)
    parts = draw_parts(2)
    first.gone.fill_(1)
    reduce_rows(first, parts[0])
    expected = torch.zeros(MAX_ROWS, WIDTH, dtype=torch.int64)
    expected[:ROWS] = words_of(parts[0].sum(0), 1)
    assert torch.equal(second.inbox[1, 0], expected)
    assert not second.inbox[0].any()
    assert not second.inbox[1, 1].any()
    assert not first.inbox.any()
    assert first.rounds.tolist() == [1] * ROWS + [0] * (MAX_ROWS - ROWS)


def _drop_a_rank(own: AllReduceBuffers, stamp: int) -> None:
    own.inbox[stamp & 1, 0].zero_()


def _swap_places(own: AllReduceBuffers, stamp: int) -> None:
    own.inbox[:] = own.inbox.flip(0) if stamp % 2 else own.inbox


def _swap_order(own: AllReduceBuffers, stamp: int) -> AllReduceBuffers:  # noqa: ARG001
    """Add the last rank's sum before those of the others."""
    return replace(own, rank=0, inbox=own.inbox.roll(1, 1))


BUGS: dict[str, Callable[[AllReduceBuffers, int], AllReduceBuffers | None]]
BUGS = {"dropped rank": _drop_a_rank, "swapped places": _swap_places, "swapped order": _swap_order}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("bug", BUGS)
def test_comparison_detects_wrong_sums(bug: str) -> None:
    assert not all(run_rounds(3, BUGS[bug]))


def test_kernel_waits_for_the_stamp_of_its_round() -> None:
    """It continues when the words arrive; until then the inbox has those of two rounds ago."""
    _other, own = make_buffers(2)
    parts = draw_parts(2)
    for stamp in (1, 2):
        send(own, 0, -parts[0].sum(0), stamp)
        reduce_rows(own, parts[1])

    def send_later() -> None:
        time.sleep(0.3)
        send(own, 0, parts[0].sum(0), 3)

    thread = threading.Thread(target=send_later)
    thread.start()
    assert torch.equal(reduce_rows(own, parts[1]), sum_in_order(parts))
    thread.join()


def test_kernel_does_not_wait_for_an_ended_rank() -> None:
    _other, own = make_buffers(2)
    peer_memory._exchange_aborter(own.gone)()
    reduce_rows(own, draw_parts(2)[1])
    assert own.rounds.tolist()[:ROWS] == [1] * ROWS


class _SingleRank:
    """Stand-in for a single rank, which sends to itself."""

    rank, size, device = 0, 1, torch.device("cpu")

    def __init__(self) -> None:
        self.on_abort: list[Any] = []

    def all_reduce_min(self, number: int) -> int:
        return number

    def broadcast(self, x: torch.Tensor) -> None:
        """Keep the rank's own data."""


def test_failing_peer_memory_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = _SingleRank()
    buffers = open_peer_buffers(ranks, 16)
    assert buffers is not None
    assert buffers.local.tolist() == [0] * 16
    write = peer_memory._write
    monkeypatch.setattr(peer_memory, "_write", lambda target, at, word: write(target, at, word + 1))
    assert open_peer_buffers(ranks, 16) is None


def test_rows_beyond_the_limit_use_the_usual_all_reduce() -> None:
    """The usual all-reduce takes them, and nothing is counted."""
    small = replace(make_buffers(2)[0], max_rows=4)
    model: Any = SimpleNamespace(exchange=small)
    attention: Any = SimpleNamespace(path_counts=Counter())
    assert CausalModel.all_reduce_for(model, 5, attention) is None
    assert not attention.path_counts
    assert CausalModel.all_reduce_for(model, 4, attention) is small
    assert attention.path_counts == {EnginePath.FUSED_ALL_REDUCE: 1}
