"""What saves bytes is undone, and found by the bytes that it costs, and named.

The baseline is the step as it is; then one thing at a time is undone.
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
    from roseinfer.attention.backend import StepBatch
    from tests.gates.byte_steps import ByteStep

pytestmark = interpreted
WEIGHTS, CACHE, ELSE = "bytes of weights", "bytes of keys and values", "bytes of all else"
LAYERS, HEADS, HEAD_DIM = 2, 2, 12
SIZE = 2
"""The bytes of a number in bfloat16."""


def measured(step: ByteStep) -> StepBytes:
    memory = StepMemory(step.weights, step.cache, step.context_bytes)
    with fast_interpreter():
        return measure_bytes(step.step, memory, "cpu")


def grown(now: StepBytes, was: StepBytes) -> Mapping[str, Mapping[str, str]]:
    """Return the groups whose sum rose; of each, what is named for it with both counts."""
    found: dict[str, dict[str, str]] = {}
    title = ""
    for line in judge(now.work, was.work, ()).increases:
        name, _, counts = line.strip().partition(": ")
        if line.startswith("    "):
            found[title][name] = counts
        else:
            title = name
            found[title] = {}
    return found


@pytest.fixture(scope="module")
def paged() -> ByteStep:
    return second_token(llama("cpu"), "cpu", paged_attention=True)


@pytest.fixture(scope="module")
def as_it_is(paged: ByteStep) -> StepBytes:
    return measured(paged)


def test_the_whole_cache_copied_is_named(
    paged: ByteStep, as_it_is: StepBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads a copy of all blocks, as of a cache that is brought into order first."""
    singly = TritonAttention._attend_decodes

    def copying(self: Any, *args: Any) -> torch.Tensor:
        kv = self.kv
        keys, values = kv.keys.clone(), kv.values.clone()
        kv.caches = lambda layer: (keys[layer], values[layer])
        try:
            return singly(self, *args)
        finally:
            del kv.caches

    monkeypatch.setattr(TritonAttention, "_attend_decodes", copying)
    found = grown(measured(paged), as_it_is)
    whole = LAYERS * sum(cache.nbytes for cache in paged.cache)
    assert found[CACHE] == {"clone": f"{whole}, baseline 0"}
    assert set(found) == {CACHE, ELSE}
    assert {"clone", "_decode_kernel"} <= set(found[ELSE])


def test_contexts_read_to_the_length_of_the_longest_are_named(
    paged: ByteStep, as_it_is: StepBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = TritonAttention.prepare

    def padding(self: Any, batch: StepBatch) -> None:
        prepare(self, replace(batch, lengths=[max(batch.lengths)] * len(batch.lengths)))

    monkeypatch.setattr(TritonAttention, "prepare", padding)
    found = grown(measured(paged), as_it_is)
    token = 2 * LAYERS * HEADS * HEAD_DIM * SIZE
    exact, padded = sum(CONTEXTS) + len(CONTEXTS), (max(CONTEXTS) + 1) * len(CONTEXTS)
    assert found == {CACHE: {"_decode_kernel": f"{padded * token}, baseline {exact * token}"}}


def test_a_copy_of_the_new_keys_is_named(
    paged: ByteStep, as_it_is: StepBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_and_attend = TritonAttention.store_and_attend

    def copying(self: Any, layer: int, query: Any, key: Any, value: Any) -> torch.Tensor:
        return store_and_attend(self, layer, query, key.clone(), value)

    monkeypatch.setattr(TritonAttention, "store_and_attend", copying)
    found = grown(measured(paged), as_it_is)
    copies = 2 * LAYERS * len(CONTEXTS) * HEADS * HEAD_DIM * SIZE
    assert found == {ELSE: {"clone": f"{copies}, baseline 0"}}


ROWS, INPUTS, OUTPUTS = 4, 24, 40


def of_a_layer(
    run: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype = torch.bfloat16
) -> StepBytes:
    """A step that is a single layer, whose weights lie as torch's ``Linear`` has them."""
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype)
    x = torch.ones((ROWS, INPUTS), dtype=dtype)
    memory = StepMemory(layer, (), lambda: 0)
    with torch.inference_mode():
        return measure_bytes(Step(lambda: run(x, layer.weight.T), ROWS), memory, "cpu")


def test_a_layer_that_runs_row_by_row_is_named() -> None:
    found = grown(
        of_a_layer(lambda x, weight: [linear(row[None], weight) for row in x]), of_a_layer(linear)
    )
    once = INPUTS * OUTPUTS * SIZE
    assert found == {WEIGHTS: {"_whole_kernel": f"{ROWS * once}, baseline {once}"}}


def test_a_weight_transposed_in_every_step_is_named() -> None:
    """The kernel reads the copy, and the weights are read as often as before."""
    found = grown(of_a_layer(lambda x, weight: linear(x, weight.contiguous())), of_a_layer(linear))
    assert set(found) == {ELSE}
    assert found[ELSE]["contiguous"] == f"{INPUTS * OUTPUTS * SIZE}, baseline 0"


def test_weights_in_float32_are_named() -> None:
    found = grown(of_a_layer(linear, torch.float32), of_a_layer(linear))
    once = INPUTS * OUTPUTS * SIZE
    assert found[WEIGHTS] == {"_whole_kernel": f"{2 * once}, baseline {once}"}
