"""The benchmark of prefill attention: equal results of timed kernels, and the floor."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer.bench.__main__ import main
from roseinfer.bench.attention import PrefillRig, Speeds, floor, operations, time_prefill
from roseinfer.bench.cases import Shape

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
TOLERANCE = {"cuda": 2e-2, "cpu": 2e-6}


def rig(device: str, text: str) -> PrefillRig:
    torch.manual_seed(3)
    return PrefillRig(Shape.read(text), 16, torch.device(device), DTYPES[device])


def test_prefill_rows_have_the_requested_shapes(device: str, tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    shapes = ["2x0+40:4/2x16", "1x30+20:4/4x16"]
    arguments = ["--shapes", *shapes, "3x16:2/2x8", "--device", device, "--rounds", "1"]
    assert main(["attention", *arguments, "--json", str(file)]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    rows, facts = document["tables"]["prefill"], document["facts"]
    ours, torch_path = {
        "cuda": ("attention_chunk_triton", "torch_flash_attention"),
        "cpu": ("attention_reference", "torch_attention"),
    }[device]
    measured = [(row["shape"], row["path"]) for row in rows]
    assert measured == [(shapes[0], ours), (shapes[0], torch_path), (shapes[1], ours)]
    least = 2 * 2 * 16 * 4 * 2 * (40 * 41 // 2) / facts["product_tflop_per_s"] / 1e6
    moved = 2 * 40 * 16 * (2 * 2 + 2 * 4) * DTYPES[device].itemsize
    read = moved / facts["copy_bandwidth_gb_per_s"] / 1e3
    assert rows[0]["floor_us"] == pytest.approx(max(least, read))
    for row in rows:
        assert row["floor_ratio"] == row["us"] / row["floor_us"]
        assert row["tflop_per_s"] > 0
    assert {row["shape"] for row in document["tables"]["attention"]} == {"3x16:2/2x8"}


@pytest.mark.parametrize("text", ["2x0+40:4/2x16", "3x0+16:2/2x16", "2x21+9:4/1x16"])
def test_timed_kernels_compute_the_same(device: str, text: str) -> None:
    """Runs an interpreted kernel on a CPU. Each sequence has blocks in an order of its own."""
    prefill = rig(device, text)
    _, ours = prefill.kernel()
    kernels = [ours] if prefill.shape.stored else [ours, prefill.torch_attention()]
    outs = [[attend(layer).reshape(prefill.query.shape) for layer in (0, 1)] for attend in kernels]
    for layer in (0, 1):
        right = prefill.reference(layer)
        for out in outs:
            assert (out[layer] - right).abs().max() < TOLERANCE[device]
    assert not torch.equal(prefill.reference(0), prefill.reference(1)), (
        "expected layers to alternate"
    )


def test_blocks_are_not_adjacent() -> None:
    prefill = rig("cpu", "4x3+70:2/2x8")
    assert {len(blocks) for blocks in prefill.lists} == {5}
    assert len({block for blocks in prefill.lists for block in blocks}) == 4 * 5
    steps = [b - a for blocks in prefill.lists for a, b in itertools.pairwise(blocks)]
    assert sum(step == 1 for step in steps) < 4
    for blocks in prefill.lists:
        assert prefill.kv.gather_sequence(0, blocks)[0].shape == (2, 73, 8)


@pytest.mark.parametrize("text", ["2x0+7:4/2x8", "3x5+4:6/2x16"])
def test_operations_are_those_of_all_query_key_pairs(text: str) -> None:
    shape = Shape.read(text)
    pairs = sum(
        key <= query for query in range(shape.stored, shape.context) for key in range(shape.context)
    )
    two_products = 2 * (2 * shape.head_dim) * pairs
    assert operations(shape) == two_products * shape.q_heads * shape.sequences


def test_floor_is_the_larger_of_bytes_and_operations() -> None:
    shape = Shape.read("2x5+4:4/2x8")
    moved = 2 * (2 * 9 * 2 * 8 + 2 * 4 * 4 * 8) * 2  # keys and values; queries and results
    slow_memory, slow_products = Speeds(1e6, 1e15), Speeds(1e15, 1e6)
    assert floor(shape, torch.float16, slow_memory) == (moved, "bytes")
    assert floor(shape, torch.float16, slow_products) == (operations(shape), "operations")


def test_unavailable_torch_attention_is_reported(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_layer: int) -> torch.Tensor:
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(PrefillRig, "torch_attention", lambda _rig: refuse)
    for where, kernels, ours in (
        ("cpu", False, "attention_reference"),
        (device, True, "attention_chunk_triton"),
    ):
        refused = "torch_flash_attention" if where == "cuda" else "torch_attention"
        prefill = rig(where, "2x0+8:2/2x8")
        rows, reasons = time_prefill(prefill, 1, Speeds(1.0, 1.0), kernels=kernels)
        assert [row.path for row in rows] == [ours]
        assert reasons == [(f"{refused} of 2x0+8:2/2x8", "No available kernel")]
