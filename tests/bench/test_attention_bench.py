"""The attention benchmark: its rows, its shapes, and the context that it times."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer.attention.reference import append_and_attend_reference
from roseinfer.bench.__main__ import main
from roseinfer.bench.attention import DecodeRig
from roseinfer.bench.cases import Shape
from roseinfer.layer_traits import LayerTraits

if TYPE_CHECKING:
    from pathlib import Path


def test_attention_rows_have_the_requested_shapes(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "attention.json"
    shapes = ["2x70:4/2x16", "3x64:2/2x8"]
    arguments = ["--shapes", *shapes, "--device", device, "--rounds", "1", "--json", str(file)]
    assert main(["attention", *arguments]) == 0
    document = json.loads(file.read_text())
    bandwidth = document["facts"]["copy_bandwidth_gb_per_s"]
    rows = document["tables"]["attention"]
    paths = ["attention_append_and_attend", "attention_decode_triton"]
    paths = paths if device == "cuda" else ["attention_slots_reference"]
    measured = [(row["shape"], row["path"]) for row in rows]
    assert measured == [(shape, path) for shape in shapes for path in paths]
    size = {"cuda": 2, "cpu": 4}[device]
    assert rows[0]["floor_us"] == pytest.approx(2 * 2 * 70 * 2 * 16 * size / bandwidth / 1e3)
    assert all(row["floor_ratio"] == row["us"] / row["floor_us"] for row in rows)
    assert ("Triton" in capsys.readouterr().out) == (device == "cpu"), (
        "expected the reason only where kernels are not timed"
    )


def test_timed_attention_covers_the_whole_context() -> None:
    shape = Shape.read("2x70:4/2x16")
    rig = DecodeRig(shape, 64, torch.device("cpu"), torch.float32)
    keys, values = rig.layers[0]

    def out() -> torch.Tensor:
        return append_and_attend_reference(
            *rig.new, keys, values, rig.tables, rig.stored, LayerTraits(0.25)
        )

    before = out()
    for position in range(69):  # the last is where the new token goes
        block = rig.tables[1, position // 64]
        values[block, :, position % 64] += 100
        changed = out()
        assert not torch.equal(changed[1], before[1])
        assert torch.equal(changed[0], before[0])
        before = changed
    values[rig.tables[1, 1], :, 70 - 64 :] += 100
    assert torch.equal(out(), before), "expected no effect of slots after the context"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "64x1024",
            "64x1024: invalid shape; use one such as 64x1024:32/8x128 or 8x0+2048:32/8x128",
        ),
        ("0x4:2/2x8", "0x4:2/2x8: invalid shape"),
        ("4x4:2/2x8,", "4x4:2/2x8,: invalid shape"),
        ("4x0:2/2x8", "4x0:2/2x8: invalid shape"),
        ("4x4+0:2/2x8", "4x4+0:2/2x8: invalid shape"),
        ("4x+4:2/2x8", "4x+4:2/2x8: invalid shape"),
        ("4x4:3/2x8", "4x4:3/2x8: 3 query heads are no multiple of 2 KV heads"),
    ],
)
def test_invalid_shape_is_refused(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["attention", "--shapes", text])
    assert message in capsys.readouterr().err


def test_shape_has_stored_and_new_tokens() -> None:
    prompts, step = Shape.read("8x0+2048:32/8x128"), Shape.read("64x1024:32/8x128")
    assert (prompts.sequences, prompts.stored, prompts.new, prompts.context) == (8, 0, 2048, 2048)
    assert (step.sequences, step.stored, step.new, step.context) == (64, 1023, 1, 1024)
    assert (step.q_heads, step.kv_heads, step.head_dim) == (32, 8, 128)
    chunk = Shape.read("1x7936+256:12/12x64")
    assert (chunk.stored, chunk.new, chunk.context) == (7936, 256, 8192)
