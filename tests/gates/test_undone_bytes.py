"""Optimisations of memory traffic: undoing each is found by its bytes, and named.

The baseline is the unchanged step; then one optimisation at a time is undone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_roseinfer.gates.bytes_moved import StepMemory, measure_bytes
from pytest_roseinfer.gates.step_work import Step, judge
from pytest_roseinfer.run.interpreter import fast_interpreter
from roseinfer.attention.triton import TritonAttention
from roseinfer.kernels.triton.linear import linear
from tests.gates.byte_steps import CONTEXTS, llama, second_token
from tests.interpreted import interpreted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_roseinfer.gates.bytes_moved import StepBytes
    from roseinfer.kv.manager import StepBatch
    from tests.gates.byte_steps import ByteStep

pytestmark = interpreted
WEIGHTS, CACHE, ACTIVATIONS = "bytes of weights", "bytes of keys and values", "bytes of all else"
LAYERS, HEADS, HEAD_DIM = 2, 2, 12
SIZE = 2
"""Bytes of a bfloat16 number."""


def measure(step: ByteStep) -> StepBytes:
    memory = StepMemory(step.weights, step.cache, step.context_bytes)
    with fast_interpreter():
        return measure_bytes(step.step, memory, "cpu")


def increases_of(changed: StepBytes, baseline: StepBytes) -> Mapping[str, Mapping[str, str]]:
    """Return the groups whose sum rose, each with the named operations and their counts."""
    increases: dict[str, dict[str, str]] = {}
    title = ""
    for line in judge(changed.work, baseline.work, ()).increases:
        name, _, counts = line.strip().partition(": ")
        if line.startswith("    "):
            increases[title][name] = counts
        else:
            title = name
            increases[title] = {}
    return increases


@pytest.fixture(scope="module")
def paged() -> ByteStep:
    return second_token(llama("cpu"), "cpu", paged_attention=True)


@pytest.fixture(scope="module")
def baseline_bytes(paged: ByteStep) -> StepBytes:
    return measure(paged)


@pytest.mark.slow
def test_copy_of_the_whole_cache_is_named(
    paged: ByteStep, baseline_bytes: StepBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads a copy of all blocks, as in a cache that is reordered first."""
    attend_decodes = TritonAttention._attend_decodes

    def with_copies(self: Any, *args: Any) -> torch.Tensor:
        kv = self.kv
        keys, values = kv.keys.clone(), kv.values.clone()
        kv.caches = lambda layer: (keys[layer], values[layer])
        try:
            return attend_decodes(self, *args)
        finally:
            del kv.caches

    monkeypatch.setattr(TritonAttention, "_attend_decodes", with_copies)
    increases = increases_of(measure(paged), baseline_bytes)
    whole_cache = LAYERS * sum(cache.nbytes for cache in paged.cache)
    assert increases[CACHE] == {"clone": f"{whole_cache}, baseline 0"}
    assert set(increases) == {CACHE, ACTIVATIONS}
    assert {"clone", "_decode_kernel"} <= set(increases[ACTIVATIONS])


@pytest.mark.slow
def test_contexts_padded_to_the_longest_are_named(
    paged: ByteStep, baseline_bytes: StepBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = TritonAttention.prepare

    def prepare_padded(self: Any, batch: StepBatch) -> None:
        prepare(self, replace(batch, lengths=[max(batch.lengths)] * len(batch.lengths)))

    monkeypatch.setattr(TritonAttention, "prepare", prepare_padded)
    increases = increases_of(measure(paged), baseline_bytes)
    token = 2 * LAYERS * HEADS * HEAD_DIM * SIZE
    exact, padded = sum(CONTEXTS) + len(CONTEXTS), (max(CONTEXTS) + 1) * len(CONTEXTS)
    assert increases == {CACHE: {"_decode_kernel": f"{padded * token}, baseline {exact * token}"}}


def test_copy_of_the_new_keys_is_named(
    paged: ByteStep, baseline_bytes: StepBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_and_attend = TritonAttention.store_and_attend

    def with_copies(self: Any, layer: int, query: Any, key: Any, value: Any) -> torch.Tensor:
        return store_and_attend(self, layer, query, key.clone(), value)

    monkeypatch.setattr(TritonAttention, "store_and_attend", with_copies)
    increases = increases_of(measure(paged), baseline_bytes)
    copies = 2 * LAYERS * len(CONTEXTS) * HEADS * HEAD_DIM * SIZE
    assert increases == {ACTIVATIONS: {"clone": f"{copies}, baseline 0"}}


ROWS, INPUTS, OUTPUTS = 4, 24, 40


def layer_bytes(
    run: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype = torch.bfloat16
) -> StepBytes:
    """Return the bytes of a single layer, whose weights are stored as in torch's ``Linear``."""
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype)
    x = torch.ones((ROWS, INPUTS), dtype=dtype)
    memory = StepMemory(layer, (), lambda: 0)
    with torch.inference_mode():
        return measure_bytes(Step(lambda: run(x, layer.weight.T), ROWS), memory, "cpu")


def test_layer_run_row_by_row_is_named() -> None:
    increases = increases_of(
        layer_bytes(lambda x, weight: [linear(row[None], weight) for row in x]), layer_bytes(linear)
    )
    weight_bytes = INPUTS * OUTPUTS * SIZE
    assert increases == {
        WEIGHTS: {"_whole_kernel": f"{ROWS * weight_bytes}, baseline {weight_bytes}"}
    }


def test_weight_transposed_in_every_step_is_named() -> None:
    """The kernel reads the copy, and the weights are read as often as before."""
    increases = increases_of(
        layer_bytes(lambda x, weight: linear(x, weight.contiguous())), layer_bytes(linear)
    )
    assert set(increases) == {ACTIVATIONS}
    assert increases[ACTIVATIONS]["contiguous"] == f"{INPUTS * OUTPUTS * SIZE}, baseline 0"


def test_weights_in_float32_are_named() -> None:
    increases = increases_of(layer_bytes(linear, torch.float32), layer_bytes(linear))
    weight_bytes = INPUTS * OUTPUTS * SIZE
    assert increases[WEIGHTS] == {"_whole_kernel": f"{2 * weight_bytes}, baseline {weight_bytes}"}
