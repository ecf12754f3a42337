"""Bytes moved by operations, kernels and graphs, and the ones that are not counted."""

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
"""Bytes of a row of ``TABLE``, and of the tensors of ones."""
TABLE = torch.zeros((100, 2))
NEW = torch.zeros((3, 2))
ROWS = torch.tensor([3, 1, 3])
INDEX = 8 * len(ROWS)
ONES = torch.ones(2)


def record_bytes(step: Callable[[], object], device: str = "cpu") -> ByteRecorder:
    recorder = ByteRecorder(device)
    with recorder:
        step()
    return recorder


def bytes_by_operation(step: Callable[[], object]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, _, amount in record_bytes(step).accesses:
        assert isinstance(amount, int)
        counts[name] += amount
    return dict(counts)


INDEXED = INDEX + 2 * len(ROWS) * WIDTH
"""Bytes of indices, rows read and rows written."""
OPERATIONS: dict[str, tuple[Callable[[], object], dict[str, int]]] = {
    "inputs are read and results written": (lambda: ONES + ONES[:1], {"add": 4 + 2 * WIDTH}),
    "a repeated input is read once": (lambda: ONES * ONES, {"mul": 2 * WIDTH}),
    "in place reads and writes": (
        lambda: ONES.clone().add_(1),
        {"clone": 2 * WIDTH, "add_": 2 * WIDTH},
    ),
    "an overwritten tensor is not read": (
        lambda: ONES.new_empty(2).copy_(ONES).zero_(),
        {"copy_": 2 * WIDTH, "zero_": WIDTH},
    ),
    "out is not read": (
        lambda: torch.add(ONES, ONES, out=torch.empty(2)),
        {"add": 2 * WIDTH},
    ),
    "an uninitialised tensor moves nothing": (lambda: torch.empty(9).new_empty(3), {}),
    "a tensor of zeros is written": (lambda: torch.zeros(3), {"zeros": 12}),
    "views move nothing": (lambda: TABLE[3:5].T.unsqueeze(0).expand(5, 2, 2), {}),
    "a view moves its own elements": (lambda: TABLE[3:5].sum(), {"sum": 2 * WIDTH + 4}),
    "an expanded dimension is counted once": (
        lambda: ONES.expand(50, 2).sum(),
        {"sum": WIDTH + 4},
    ),
    "overlapping windows are counted once": (
        lambda: torch.as_strided(ONES, (2, 2), (0, 1)).sum() + TABLE.view(-1).unfold(0, 8, 1).sum(),
        {"sum": WIDTH + 4 + 100 * WIDTH + 4, "add": 12},
    ),
    "embedding": (lambda: torch.embedding(TABLE, ROWS), {"embedding": INDEXED}),
    "index_select": (lambda: TABLE.index_select(0, ROWS), {"index_select": INDEXED}),
    "index": (lambda: TABLE[ROWS], {"index": INDEXED}),
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
    "a mask counts as full": (
        lambda: TABLE.index_put_((TABLE[:, 0] > 1,), ONES),
        {"gt": 500, "index_put_": 100 + WIDTH + 100 * WIDTH},
    ),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("case", OPERATIONS)
def test_bytes_of_an_operation_follow_from_its_arguments(case: str, inference: bool) -> None:
    step, expected = OPERATIONS[case]
    with torch.inference_mode(inference):
        assert bytes_by_operation(step) == expected


def test_tensors_on_another_device_are_not_counted() -> None:
    assert record_bytes(lambda: ONES + ONES, "cuda").accesses == []


def test_unknown_operations_are_named() -> None:
    sparse = TABLE.to_sparse()
    recorder = record_bytes(lambda: sparse * 2)
    assert dict(recorder.not_counted) == {"aten::mul": 1}
    assert recorder.accesses == []


# ------------------------------------------------------------------------------------ kernels


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(numbers, lengths, out, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    at = tl.arange(0, TILE)
    length = tl.load(lengths + row)
    tl.store(out + row, tl.sum(tl.load(numbers + row * TILE + at, at < length, other=0.0), 0))


def _traffic_of_rows(arguments: Any) -> dict[str, Any]:
    lengths = arguments["lengths"]
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
def test_kernel_without_declared_traffic_is_named() -> None:
    recorder = record_bytes(sum_rows)
    assert dict(recorder.not_counted) == {"_sum_rows": 1}
    assert recorder.accesses == []


@pytest.mark.usefixtures("interpreted")
def test_kernel_moves_its_declared_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sum_rows.fn, "traffic", _traffic_of_rows, raising=False)
    assert bytes_by_operation(sum_rows) == {"_sum_rows": 4 * 4 + 8 * 2 + 4 * 2}
    monkeypatch.setattr(_sum_rows.fn, "traffic", lambda _: {"TILE": 4})
    with pytest.raises(CannotCompare, match="_sum_rows: declares traffic of 'TILE', which is"):
        record_bytes(sum_rows)


@pytest.mark.usefixtures("interpreted")
def test_compiled_launch_is_recorded_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton describes a launch to its hooks by name only, so the description is observed."""
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
    """A stand-in, on a CPU, for a captured CUDA graph."""

    def __new__(cls) -> Graph:
        return object.__new__(cls)

    def __init__(self) -> None:
        """Allocate no graph on a device."""


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """Return a CPU's graph whose replays do nothing."""
    if torch.cuda.is_available():
        pytest.skip("real graphs are counted in test_decode_bytes.py")
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda _: None)
    monkeypatch.setattr("pytest_roseinfer.gates.bytes_moved.DEVICE_TYPE", "cpu")
    return Graph()


def record_replay(graph: Graph) -> ByteRecorder:
    recorder = ByteRecorder("cpu")
    with recorder, record_replays(recorder):
        graph.replay()
    return recorder


@pytest.mark.usefixtures("interpreted")
def test_replay_counts_the_captured_traffic_at_current_lengths(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sum_rows.fn, "traffic", _traffic_of_rows, raising=False)
    lengths = torch.tensor([0, 0])
    with record_captures():
        graph.capture_begin()
        _sum_rows[(2,)](NUMBERS, lengths, OUT, TILE=4)
        torch.add(ONES, ONES, out=OUT)
        graph.capture_end()
        torch.add(ONES, ONES, out=OUT)  # after the capture
    for length in (4, 2):
        lengths.fill_(length)
        amounts = Counter[str]()
        for name, _, amount in record_replay(graph).accesses:
            assert isinstance(amount, int)
            amounts[name] += amount
        assert amounts == {"_sum_rows": 4 * 2 * length + 8 * 2 + 4 * 2, "add": 2 * WIDTH}


def test_graph_captured_before_recording_is_named(graph: Graph) -> None:
    assert dict(record_replay(graph).not_counted) == {UNKNOWN: 1}


@pytest.mark.usefixtures("interpreted")
def test_graph_keeps_the_names_of_uncounted_kernels(graph: Graph) -> None:
    with record_captures():
        graph.capture_begin()
        sum_rows()
        graph.capture_end()
    assert dict(record_replay(graph).not_counted) == {"_sum_rows": 1}


# -------------------------------------------------------------------------------------- steps


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_bytes_of_a_step_are_split_into_weights_cache_and_activations(tied: bool) -> None:
    model, keys, tokens = Model(tied=tied), torch.zeros((8, 4)), torch.tensor([1, 2])

    def step() -> None:
        x = model.embedding(tokens)
        keys[tokens] = x
        model.head(x + keys[:3].sum(0))

    memory = StepMemory(model, [keys], lambda: 3 * 16)
    step_bytes = measure_bytes(Step(step, 2), memory, "cpu")
    table, rows, logits = 10 * 16, 2 * 16, 2 * 40
    assert {
        name: sum(counts.values()) for name, counts in step_bytes.work.groups.items() if counts
    } == {
        "weights": rows + table,
        "keys_and_values": rows + 3 * 16,
        "activations": (16 + rows) + (16 + rows) + 16 + (16 + 2 * rows) + (rows + logits),
    }
    assert step_bytes.min_bytes == {
        "weights": table + (0 if tied else rows),
        "keys_and_values": 48,
        "activations": 32,
    }
    *_, cache_line, last_line = step_bytes.in_words()
    assert last_line.startswith("  all else: 304 bytes, 9.50 times the minimum of 32")
    assert cache_line == "  keys and values: 80 bytes, 1.67 times the minimum of 48"


def test_step_that_reads_no_weights_cannot_be_compared() -> None:
    memory = StepMemory([torch.ones(3)], [], lambda: 0)
    with pytest.raises(
        CannotCompare,
        match="weights=: no counted operation reads any of them; not counted: nothing",
    ):
        measure_bytes(Step(lambda: ONES + 1, 1), memory, "cpu")


def test_replaced_cache_cannot_be_compared() -> None:
    """The step then accesses new tensors, and not the named ones."""
    cache = [torch.zeros((3, 2))]
    memory = StepMemory(ONES, cache, lambda: 3 * WIDTH)

    def step() -> None:
        cache[0] = torch.cat([cache[0][:2], NEW[:1]])
        (cache[0] * ONES).sum()

    message = r"0 bytes, 0\.00 times the minimum of 24, and .* replaces tensors of cache="
    with pytest.raises(CannotCompare, match=message):
        measure_bytes(Step(step, 1), memory, "cpu")


def test_step_memory_keeps_the_cache_alive() -> None:
    keys = torch.zeros((3, 2))
    reference = weakref.ref(keys)
    memory = StepMemory(ONES, [keys], lambda: 0)
    del keys
    assert reference() is not None
    del memory
    assert reference() is None


def test_uncounted_operations_allow_less_than_the_minimum() -> None:
    sparse = TABLE.to_sparse()

    def step() -> None:
        ONES.sum()
        _ = sparse * 2

    step_bytes = measure_bytes(Step(step, 1), StepMemory(ONES, [TABLE], lambda: 8), "cpu")
    assert step_bytes.bytes_moved("keys_and_values") == 0


def test_growing_contexts_cannot_be_compared() -> None:
    length = [0]

    def step() -> None:
        length[0] += 1
        (TABLE[: length[0]] * ONES).sum()

    with pytest.raises(CannotCompare, match=r"(?s)values, mul: 16 and 24.*before= must restore"):
        measure_bytes(Step(step, 1), StepMemory(ONES, [TABLE], lambda: 0), "cpu")
