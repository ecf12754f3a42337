"""Models of random shapes: reproducible draws, and reports of differences in mixes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from roseinfer import LLM
from tests.models.fused import random_shapes


def test_seeds_draw_all_families_and_odd_vocabularies_reproducibly() -> None:
    shapes = [random_shapes.shape_of(random.Random(seed)) for seed in range(200)]
    assert shapes == [random_shapes.shape_of(random.Random(seed)) for seed in range(200)]
    assert {shape.family for shape in shapes} == set(random_shapes.FAMILIES)
    vocabularies = {shape.sizes["vocab_size"] for shape in shapes}
    assert {32000, 50257, 50304} < vocabularies
    assert sum(size % 8 > 0 for size in vocabularies) > 10


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is batch invariant")
@pytest.mark.parametrize("claimed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_difference_fails_only_if_batch_invariance_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, claimed: bool
) -> None:
    """On a CPU GEMMs round differently for other batch sizes."""
    shape = random_shapes.Shape("gpt2", {"n_embd": 192, "n_head": 3, "n_layer": 2})
    monkeypatch.setattr(random_shapes, "shape_of", lambda _: shape)
    monkeypatch.setattr(LLM, "batch_invariant", property(lambda _: claimed))
    status = random_shapes.main(["--count", "1", "--mixes", "2", "--device", "cpu", "--seed", "5"])
    text = capsys.readouterr().out
    assert status == claimed
    assert text.startswith("seed 5: gpt2")
    assert ("FAILED: mix" if claimed else "not claimed: mix") in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU is not batch invariant")
def test_random_shapes_are_batch_invariant_as_claimed(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")
    results: list[Any] = []
    for seed in range(6):
        results += random_shapes.run(seed, 2, device)
    assert any(each.claimed for each in results)
    assert not [each.summary for each in results if each.claimed and each.summary]
