"""The benchmark of prompts' attention: all that is timed computes the same, and its floor."""

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


def test_its_rows_are_those_asked_for(device: str, tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    shapes = ["2x0+40:4/2x16", "1x30+20:4/4x16"]
    asked = ["--shapes", *shapes, "3x16:2/2x8", "--device", device, "--rounds", "1"]
    assert main(["attention", *asked, "--json", str(file)]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    rows, facts = document["tables"]["prefill"], document["facts"]
    ours, torchs = {
        "cuda": ("attention_chunk_triton", "torch_flash_attention"),
        "cpu": ("attention_reference", "torch_attention"),
    }[device]
    found = [(row["shape"], row["path"]) for row in rows]
    assert found == [(shapes[0], ours), (shapes[0], torchs), (shapes[1], ours)]
    least = 2 * 2 * 16 * 4 * 2 * (40 * 41 // 2) / facts["product_tflop_per_s"] / 1e6
    moved = 2 * 40 * 16 * (2 * 2 + 2 * 4) * DTYPES[device].itemsize
    read = moved / facts["copy_bandwidth_gb_per_s"] / 1e3
    assert rows[0]["floor_us"] == pytest.approx(max(least, read))
    for row in rows:
        assert row["floor_ratio"] == row["us"] / row["floor_us"]
        assert row["tflop_per_s"] > 0
    assert {row["shape"] for row in document["tables"]["attention"]} == {"3x16:2/2x8"}


@pytest.mark.parametrize("text", ["2x0+40:4/2x16", "3x0+16:2/2x16", "2x21+9:4/1x16"])
def test_all_that_is_timed_computes_the_same(device: str, text: str) -> None:
    """On a CPU the kernel is interpreted, and the order of blocks is another in every sequence."""
    made = rig(device, text)
    _, ours = made.kernel()
    ways = [ours] if made.shape.stored else [ours, made.torch_attention()]
    outs = [[attend(layer).reshape(made.query.shape) for layer in (0, 1)] for attend in ways]
    for layer in (0, 1):
        right = made.reference(layer)
        for out in outs:
            assert (out[layer] - right).abs().max() < TOLERANCE[device]
    assert not torch.equal(made.reference(0), made.reference(1)), "layers take turns"


def test_blocks_lie_scattered() -> None:
    made = rig("cpu", "4x3+70:2/2x8")
    assert {len(own) for own in made.lists} == {5}
    assert len({block for own in made.lists for block in own}) == 4 * 5
    steps = [b - a for own in made.lists for a, b in itertools.pairwise(own)]
    assert sum(step == 1 for step in steps) < 4
    for own in made.lists:
        assert made.kv.gather_sequence(0, own)[0].shape == (2, 73, 8)


@pytest.mark.parametrize("text", ["2x0+7:4/2x8", "3x5+4:6/2x16"])
def test_the_operations_are_those_of_all_pairs(text: str) -> None:
    shape = Shape.read(text)
    pairs = sum(
        key <= query for query in range(shape.stored, shape.context) for key in range(shape.context)
    )
    two_products = 2 * (2 * shape.head_dim) * pairs
    assert operations(shape) == two_products * shape.q_heads * shape.sequences


def test_the_floor_is_what_takes_longer() -> None:
    shape = Shape.read("2x5+4:4/2x8")
    moved = 2 * (2 * 9 * 2 * 8 + 2 * 4 * 4 * 8) * 2  # keys and values; queries and results
    slow_memory, slow_products = Speeds(1e6, 1e15), Speeds(1e15, 1e6)
    assert floor(shape, torch.float16, slow_memory) == (moved, "bytes")
    assert floor(shape, torch.float16, slow_products) == (operations(shape), "operations")


def test_what_torch_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_layer: int) -> torch.Tensor:
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(PrefillRig, "torch_attention", lambda _rig: refuse)
    made = rig("cpu", "2x0+8:2/2x8")
    for kernels, ours in {False: "attention_reference", True: "attention_chunk_triton"}.items():
        rows, reasons = time_prefill(made, 1, Speeds(1.0, 1.0), kernels=kernels)
        assert [row.path for row in rows] == [ours]
        assert reasons == [("torch_attention of 2x0+8:2/2x8", "No available kernel")]
