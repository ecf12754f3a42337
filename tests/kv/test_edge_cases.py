"""Edge cases that are often harmless, and are rejected or handled all the same."""

from __future__ import annotations

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, Condition, ConfigError
from roseinfer.kernels.triton.append import kv_append_triton_full_batch
from tests.kv.twins import assert_same_bits, build
from tests.python_process import run_python

TORCH = AppendPolicy(triton=False)


def test_counts_lack_conditions_that_were_not_met(device: str) -> None:
    kv = build(device, policy=TORCH)
    prompt = torch.ones(1, kv.num_heads, 3, kv.head_dim, device=device)
    kv.register_prefill_layer(0, prompt, prompt)
    assert Condition.IN_PLACE not in kv.path_counts


def test_plan_of_another_cache_is_rejected(device: str) -> None:
    mine, other = build(device, policy=TORCH), build(device, policy=TORCH)
    plan = mine.plan_append(0, [[]])
    before = other.keys.clone()
    new = torch.ones(1, mine.num_heads, mine.head_dim, device=device)
    with pytest.raises(BadArgument, match="made by another cache"):
        other.write(plan, 0, new, new)
    assert_same_bits(other.keys, before)


def test_long_prompt_does_not_grow_the_staging_ring(device: str) -> None:
    kv = build(device, policy=TORCH, block_size=128, max_blocks_per_layer=100, head_dim=1)
    staging = kv._append_executor._staging
    capacity = staging._capacity
    prompt = torch.arange(12_000, device=device).view(1, 1, -1, 1).expand(1, kv.num_heads, -1, 1)
    ids = kv.register_prefill_layer(0, prompt.float(), -prompt.float())
    keys, values = kv.gather_sequence(0, ids)
    assert torch.equal(keys, prompt[0].float())
    assert torch.equal(values, -prompt[0].float())
    assert staging._capacity == capacity


def test_subclass_of_list_is_accepted_on_every_path(device: str) -> None:
    class Blocks(list[int]):
        pass

    kv = build(device, policy=TORCH)
    new = torch.ones(1, kv.num_heads, kv.head_dim, device=device)
    single, batched = Blocks(), Blocks()
    kv.append_token(0, single, new[0], new[0])
    kv.append_token_batch(0, [batched], new, new)
    assert len(single) == len(batched) == 1


def test_kernels_reject_tensors_that_are_not_floats(device: str) -> None:
    cache = torch.zeros(2, 1, 4, 8, device=device)
    new = torch.ones(1, 1, 8, device=device)
    where = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(BadArgument, match=r"key_new must be of floats, not torch.int64"):
        kv_append_triton_full_batch(
            k_cache_layer=cache,
            v_cache_layer=cache.clone(),
            key_new=new.long(),
            value_new=new,
            block_idx=where,
            pos=0,
        )


@pytest.mark.slow
def test_kernels_on_a_cpu_require_the_interpreter() -> None:
    code = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import torch
from roseinfer import BadArgument
from roseinfer.kernels.triton.clone import kv_clone_triton
cache, index = torch.zeros(3, 1, 4, 8), torch.zeros(1, dtype=torch.int64)
try:
    kv_clone_triton(k_cache=cache, v_cache=cache.clone(), source=index, target=index + 1)
except BadArgument as error:
    print(error)
"""
    assert "TRITON_INTERPRET=1" in run_python(code, warm=True)


def test_policy_switches_must_be_booleans() -> None:
    with pytest.raises(ConfigError, match="triton must be True or False, not 'off'"):
        AppendPolicy(triton="off")  # type: ignore[arg-type]
