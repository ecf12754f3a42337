"""What operations, kernels and graphs count as moving, and what is named as not counted."""

from __future__ import annotations

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl

from pytest_roseinfer.gates.bytes_moved import (
    UNKNOWN,
    ByteRecorder,
    StepMemory,
    measure_bytes,
    record_captures,
    record_replays,
)
from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.step_work import Launch, Step, compiled_launches

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 4 * 2
"""The bytes of a row of ``TABLE``, and of the tensors of ones."""
TABLE = torch.zeros((100, 2))
NEW = torch.zeros((3, 2))
ROWS = torch.tensor([3, 1, 3])
INDEX = 8 * len(ROWS)
ONES = torch.ones(2)


def recorded(step: Callable[[], object], device: str = "cpu") -> ByteRecorder:
    recorder = ByteRecorder(device)
    with recorder:
        step()
    return recorder


def moved(step: Callable[[], object]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for by, _, amount in recorded(step).accesses:
        assert isinstance(amount, int)
        counts[by] += amount
    return dict(counts)


PICKED = INDEX + 2 * len(ROWS) * WIDTH
"""Indices, rows read and rows written."""
OPERATIONS: dict[str, tuple[Callable[[], object], dict[str, int]]] = {
    "inputs are read and results written": (lambda: ONES + ONES[:1], {"add": 4 + 2 * WIDTH}),
    "an input that comes twice is read once": (lambda: ONES * ONES, {"mul": 2 * WIDTH}),
    "in place is both": (lambda: ONES.clone().add_(1), {"clone": 2 * WIDTH, "add_": 2 * WIDTH}),
    "what is overwritten is not read": (
        lambda: ONES.new_empty(2).copy_(ONES).zero_(),
        {"copy_": 2 * WIDTH, "zero_": WIDTH},
    ),
    "out is not read": (
        lambda: torch.add(ONES, ONES, out=torch.empty(2)),
        {"add": 2 * WIDTH},
    ),
    "a tensor without values moves nothing": (lambda: torch.empty(9).new_empty(3), {}),
    "a tensor of zeros is written": (lambda: torch.zeros(3), {"zeros": 12}),
    "views move nothing": (lambda: TABLE[3:5].T.unsqueeze(0).expand(5, 2, 2), {}),
    "a view spans what it shows": (lambda: TABLE[3:5].sum(), {"sum": 2 * WIDTH + 4}),
    "an expanded dimension is one place": (
        lambda: ONES.expand(50, 2).sum(),
        {"sum": WIDTH + 4},
    ),
    "windows that overlap are one place each": (
        lambda: torch.as_strided(ONES, (2, 2), (0, 1)).sum() + TABLE.view(-1).unfold(0, 8, 1).sum(),
        {"sum": WIDTH + 4 + 100 * WIDTH + 4, "add": 12},
    ),
    "embedding": (lambda: torch.embedding(TABLE, ROWS), {"embedding": PICKED}),
    "index_select": (lambda: TABLE.index_select(0, ROWS), {"index_select": PICKED}),
    "index": (lambda: TABLE[ROWS], {"index": PICKED}),
    "index of a column": (lambda: TABLE[ROWS, 1], {"index": INDEX + 2 * len(ROWS) * 4}),
    "gather": (lambda: TABLE.gather(0, ROWS[:, None]), {"gather": INDEX + 2 * len(ROWS) * 4}),
    "index_put_": (
        lambda: TABLE.index_put_((ROWS,), ONES),
        {"index_put_": INDEX + WIDTH + len(ROWS) * WIDTH},
    ),
    "index_put_ of columns": (
        lambda: TABLE.__setitem__((slice(None), ROWS[1:2]), ONES[:1]),
        {"index_put_": 8 + 4 + 100 * 4},
    ),
    "index_put_ that adds": (
        lambda: TABLE.index_put_((ROWS,), ONES, accumulate=True),
        {"index_put_": INDEX + WIDTH + 2 * len(ROWS) * WIDTH},
    ),
    "index_copy_": (
        lambda: TABLE.index_copy_(0, ROWS[:2], NEW[:2]),
        {"index_copy_": 16 + 4 * WIDTH},
    ),
    "scatter_add_": (
        lambda: TABLE.scatter_add_(0, ROWS[:, None], NEW[:, :1]),
        {"scatter_add_": INDEX + 12 + 2 * 12},
    ),
    "a mask may be all of it": (
        lambda: TABLE.index_put_((TABLE[:, 0] > 1,), ONES),
        {"gt": 500, "index_put_": 100 + WIDTH + 100 * WIDTH},
    ),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_moves_what_its_arguments_say(name: str, inference: bool) -> None:
    step, expected = OPERATIONS[name]
    with torch.inference_mode(inference):
        assert moved(step) == expected


def test_what_lies_on_another_device_is_not_counted() -> None:
    assert recorded(lambda: ONES + ONES, "cuda").accesses == []


def test_operations_that_nothing_is_known_of_are_named() -> None:
    sparse = TABLE.to_sparse()
    found = recorded(lambda: sparse * 2)
    assert dict(found.not_counted) == {"aten::mul": 1}
    assert found.accesses == []


# ------------------------------------------------------------------------------------ kernels


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(numbers, lengths, out, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    at = tl.arange(0, TILE)
    length = tl.load(lengths + row)
    tl.store(out + row, tl.sum(tl.load(numbers + row * TILE + at, at < length, other=0.0), 0))


def _moved_of_rows(given: Any) -> dict[str, Any]:
    lengths = given["lengths"]
    return {
        "numbers": lambda: 4 * sum(lengths.tolist()),
        "lengths": 8 * len(lengths),
        "out": 4 * len(lengths),
    }


LENGTHS = torch.tensor([3, 1])
OUT = torch.zeros(2)
NUMBERS = torch.ones((2, 4))


def sum_rows() -> None:
    _sum_rows[(2,)](NUMBERS, LENGTHS, out=OUT, TILE=4)


@pytest.fixture
def interpreted(device: str) -> None:
    if device != "cpu":
        pytest.skip("with a GPU there is no interpreter")


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_that_declares_nothing_is_named() -> None:
    found = recorded(sum_rows)
    assert dict(found.not_counted) == {"_sum_rows": 1}
    assert found.accesses == []


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_moves_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sum_rows.fn, "traffic", _moved_of_rows, raising=False)
    assert moved(sum_rows) == {"_sum_rows": 4 * 4 + 8 * 2 + 4 * 2}
    monkeypatch.setattr(_sum_rows.fn, "traffic", lambda _: {"TILE": 4})
    with pytest.raises(CannotCompare, match="_sum_rows: declares traffic of 'TILE', which is"):
        recorded(sum_rows)


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_launch_is_heard_of_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton describes a launch to its hooks by name alone, so the description is listened to."""
    from triton import knobs
    from triton.compiler.compiler import CompiledKernel, LazyDict

    monkeypatch.setattr(
        CompiledKernel, "launch_metadata", lambda *_: LazyDict({"name": "sum_of_rows"})
    )
    compiled = SimpleNamespace(src=SimpleNamespace(fn=_sum_rows))
    launches: list[Launch] = []
    with compiled_launches(launches.append):
        (hook,) = knobs.runtime.launch_enter_hook.calls
        args = (NUMBERS, LENGTHS, OUT, 4)
        hook(CompiledKernel.launch_metadata(compiled, (2, 1, 1), 0, *args))
        hook(LazyDict({"name": "of_another_path"}))
    names = ("numbers", "lengths", "out", "TILE")
    assert launches == [
        Launch("sum_of_rows", _sum_rows.fn, dict(zip(names, args, strict=True))),
        Launch("of_another_path", None, {}),
    ]
    assert knobs.runtime.launch_enter_hook.calls == []


# ------------------------------------------------------------------------------------- graphs


class Graph(torch.cuda.CUDAGraph):
    """Stands in, on a CPU, for work that a device was taught."""

    def __new__(cls) -> Graph:
        return object.__new__(cls)

    def __init__(self) -> None:
        """There is no device to ask for a graph."""


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """A graph of a CPU's, whose replays do nothing."""
    if torch.cuda.is_available():
        pytest.skip("real graphs are counted in test_decode_bytes.py")
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda _: None)
    monkeypatch.setattr("pytest_roseinfer.gates.bytes_moved.DEVICE_TYPE", "cpu")
    return Graph()


def replayed(graph: Graph) -> ByteRecorder:
    recorder = ByteRecorder("cpu")
    with recorder, record_replays(recorder):
        graph.replay()
    return recorder


@pytest.mark.usefixtures("interpreted")
def test_a_replay_moves_what_was_captured_with_the_lengths_of_now(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sum_rows.fn, "traffic", _moved_of_rows, raising=False)
    lengths = torch.tensor([0, 0])
    with record_captures():
        graph.capture_begin()
        _sum_rows[(2,)](NUMBERS, lengths, OUT, TILE=4)
        torch.add(ONES, ONES, out=OUT)
        graph.capture_end()
        torch.add(ONES, ONES, out=OUT)  # behind the capture
    for filled in (4, 2):
        lengths.fill_(filled)
        amounts = Counter[str]()
        for by, _, amount in replayed(graph).accesses:
            assert isinstance(amount, int)
            amounts[by] += amount
        assert amounts == {"_sum_rows": 4 * 2 * filled + 8 * 2 + 4 * 2, "add": 2 * WIDTH}


def test_a_graph_that_was_captured_before_is_named(graph: Graph) -> None:
    assert dict(replayed(graph).not_counted) == {UNKNOWN: 1}


@pytest.mark.usefixtures("interpreted")
def test_a_graph_passes_on_what_is_not_counted(graph: Graph) -> None:
    with record_captures():
        graph.capture_begin()
        sum_rows()
        graph.capture_end()
    assert dict(replayed(graph).not_counted) == {"_sum_rows": 1}


# -------------------------------------------------------------------------------------- steps


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.words.weight


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_step_is_shared_out_among_weights_cache_and_all_else(tied: bool) -> None:
    model, keys, tokens = Model(tied=tied), torch.zeros((8, 4)), torch.tensor([1, 2])

    def step() -> None:
        x = model.words(tokens)
        keys[tokens] = x
        model.head(x + keys[:3].sum(0))

    memory = StepMemory(model, [keys], lambda: 3 * 16)
    found = measure_bytes(Step(step, 2), memory, "cpu")
    table, rows, logits = 10 * 16, 2 * 16, 2 * 40
    assert {name: sum(counts.values()) for name, counts in found.work.groups.items() if counts} == {
        "weights": rows + table,
        "keys_and_values": rows + 3 * 16,
        "activations": (16 + rows) + (16 + rows) + 16 + (16 + 2 * rows) + (rows + logits),
    }
    assert found.min_bytes == {
        "weights": table + (0 if tied else rows),
        "keys_and_values": 48,
        "activations": 32,
    }
    *_, cache, rest = found.in_words()
    assert rest.startswith("  all else: 304 bytes, 9.50 times the minimum of 32")
    assert cache == "  keys and values: 80 bytes, 1.67 times the minimum of 48"


def test_a_step_that_reads_no_weights_compares_nothing() -> None:
    memory = StepMemory([torch.ones(3)], [], lambda: 0)
    with pytest.raises(
        CannotCompare,
        match="weights=: no counted operation reads any of them; not counted: nothing",
    ):
        measure_bytes(Step(lambda: ONES + 1, 1), memory, "cpu")


def test_a_cache_that_is_replaced_compares_nothing() -> None:
    """Its new tensors are nobody's, and those that were named are not touched."""
    cache = [torch.zeros((3, 2))]
    memory = StepMemory(ONES, cache, lambda: 3 * WIDTH)

    def step() -> None:
        cache[0] = torch.cat([cache[0][:2], NEW[:1]])
        (cache[0] * ONES).sum()

    said = r"0 bytes, 0\.00 times the minimum of 24, and .* replaces tensors of cache="
    with pytest.raises(CannotCompare, match=said):
        measure_bytes(Step(step, 1), memory, "cpu")


def test_no_other_tensor_gets_the_address_of_a_cache() -> None:
    keys = torch.zeros((3, 2))
    seen = weakref.ref(keys)
    memory = StepMemory(ONES, [keys], lambda: 0)
    del keys
    assert seen() is not None
    del memory
    assert seen() is None


def test_less_than_the_least_may_be_what_is_not_counted() -> None:
    sparse = TABLE.to_sparse()

    def step() -> None:
        ONES.sum()
        _ = sparse * 2

    found = measure_bytes(Step(step, 1), StepMemory(ONES, [TABLE], lambda: 8), "cpu")
    assert found.moved("keys_and_values") == 0


def test_contexts_that_grow_compare_nothing() -> None:
    length = [0]

    def step() -> None:
        length[0] += 1
        (TABLE[: length[0]] * ONES).sum()

    with pytest.raises(CannotCompare, match=r"(?s)values, mul: 16 and 24.*before= must restore"):
        measure_bytes(Step(step, 1), StepMemory(ONES, [TABLE], lambda: 0), "cpu")
