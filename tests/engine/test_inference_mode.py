"""Engines and caches in inference mode and outside it, wherever they were built."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from roseinfer import LLM, AppendPolicy, KVBlockManager, SamplingParams
from roseinfer.kv.storage import IndexStaging

Mode = Any
"""Factory of a context: inference mode, or none."""
LONG_PROMPTS = [list(range(1, 41)), [at % 250 for at in range(300)], [3, 4]]
"""Prompts with more blocks and tokens than the first index buffers hold."""


def outside() -> AbstractContextManager[None]:
    return nullcontext()


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("built_in", [torch.inference_mode, outside])
def test_engine_alternates_between_modes(device: str, built_in: Mode, *, resident: bool) -> None:
    def serve(*modes: Mode) -> list[list[list[int]]]:
        with modes[0]():
            llm = LLM(
                "tiny",
                device=device,
                dtype="float32",
                block_size=1,
                kv_cache_tokens=1000,
                resident_decode=resident,
                cuda_graph=False,
            )
        token_ids = []
        for mode in modes[1:]:
            with mode():
                sampled = SamplingParams(1.0, seed=1, max_new_tokens=4, ignore_eos=True)
                greedy = SamplingParams(max_new_tokens=4, logprobs=True, ignore_eos=True)
                outputs = llm.generate(LONG_PROMPTS, [greedy, sampled, sampled])
            assert [output.error for output in outputs] == [None] * 3
            token_ids.append([output.token_ids for output in outputs])
        return token_ids

    expected = serve(outside, outside)
    assert serve(built_in, outside, torch.inference_mode, outside) == expected * 3


@pytest.mark.parametrize("built_in", [torch.inference_mode, outside])
def test_cache_alternates_between_modes(device: str, built_in: Mode) -> None:
    with built_in():
        policy = AppendPolicy(triton=False)  # torch writes
        kv = KVBlockManager(1, 2, 4, 1, 400, device, torch.float32, policy)
    block_ids: list[int] = []
    for mode, count in ((outside, 3), (torch.inference_mode, 300), (outside, 2)):
        with mode():
            new = torch.full((count, 2, 4), float(count), device=device)
            kv.write(kv.plan_append(0, [block_ids], [count]), 0, new, -new)
    keys, values = kv.gather_sequence(0, block_ids)
    assert keys[0, :, 0].tolist() == [3.0] * 3 + [300.0] * 300 + [2.0] * 2
    assert torch.equal(values, -keys)


def test_index_staging_grown_in_inference_mode_is_writable_outside(device: str) -> None:
    """On a GPU a torch operation fills the ring; elsewhere only the tensor shows the mode."""
    staging = IndexStaging(torch.device(device), Counter())
    with torch.inference_mode():
        (grown,) = staging.stage([list(range(1000))]).columns
    assert not grown.is_inference()
    for turn in range(70):  # once around the ring
        assert staging.stage([[turn, 1]]).columns[0].tolist() == [turn, 1]
