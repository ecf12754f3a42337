"""Sequences on a runner, compared with transformers: logits and tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from roseinfer import AppendPolicy, KVBlockManager
from roseinfer.engine.runner import SequenceRunner
from roseinfer.kv.sequence import CachedSequence
from roseinfer.models.causal import CausalModel
from tests.models.families import CONFIGS, VOCABULARY, tiny

TOLERANCE = 2e-4
"""Tolerance of fp32 logits of about 10 that were summed in another order."""

all_families = pytest.mark.parametrize("family", CONFIGS)


@cache
def original(family: str, device: str) -> Any:
    model = tiny(family, device)
    model.set_attn_implementation("eager")  # torch's own attention ignores softcaps
    return model


def engine_for(
    family: str, device: str, *, groups_of: int = 2, kernels: bool = True, policy: Any = None
) -> SequenceRunner:
    model = CausalModel(tiny(family, device))
    shape = model.shape
    kv = KVBlockManager(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        4,
        200,
        device,
        model.dtype,
        policy or AppendPolicy(triton=device == "cuda"),
        layers_per_group=groups_of,
    )
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    return SequenceRunner(model, kv, attention="triton" if kernels else "reference")


def expected(family: str, device: str, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = original(family, device)(
            torch.tensor([tokens], device=device)
        ).logits[0, -1]
    return logits


def prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(sum(lengths))
    return [torch.randint(0, VOCABULARY, (length,)).tolist() for length in lengths]


def check_step(
    family: str, device: str, sessions: list[CachedSequence], logits: torch.Tensor
) -> None:
    """Compare the logits of every sequence, and append the argmax to each."""
    for session, row in zip(sessions, logits, strict=True):
        expected_row = expected(family, device, session.token_ids)
        torch.testing.assert_close(row, expected_row, atol=TOLERANCE, rtol=1e-4)
        top = expected_row.topk(2).values
        assert top[0] - top[1] > 2 * TOLERANCE, "tie: the weights are too small"
        assert int(row.argmax()) == int(expected_row.argmax())
        session.token_ids.append(int(expected_row.argmax()))


@pytest.mark.sampled_cases
@all_families
@pytest.mark.parametrize("groups_of", [2, 1])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_prefill_and_decode_match_transformers(
    device: str, family: str, groups_of: int, kernels: bool
) -> None:
    engine = engine_for(family, device, groups_of=groups_of, kernels=kernels)
    sessions, logits = engine.prefill(prompts(1, 4, 5, 9))
    check_step(family, device, sessions, logits)
    for _ in range(6):
        check_step(family, device, sessions, engine.extend(sessions))
    used = set(engine.path_counts)
    kernel_paths = {"attention_chunk_triton", "attention_decode_triton"}
    assert used == (kernel_paths if kernels else {"attention_reference"})


@pytest.mark.sampled_cases
@all_families
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_chunked_prefill_matches_transformers(device: str, family: str, chunk: int) -> None:
    engine = engine_for(family, device)
    (prompt,) = prompts(11)
    session = CachedSequence([[]], prompt)
    while session.num_stored < len(prompt):
        logits = engine.extend([session], [min(chunk, len(prompt) - session.num_stored)])
    check_step(family, device, [session], logits)


@pytest.mark.sampled_cases
@all_families
def test_chunked_prefill_with_decoding_sequences(device: str, family: str) -> None:
    engine = engine_for(family, device)
    running, logits = engine.prefill(prompts(3, 6))
    check_step(family, device, running, logits)
    late = CachedSequence([[]], prompts(10)[0])
    for _ in range(3):
        logits = engine.extend([*running, late], [1, 1, min(4, 10 - late.num_stored)])
        check_step(family, device, running, logits[:2])
    check_step(family, device, [late], logits[2:])


@pytest.mark.sampled_cases
@all_families
def test_forks_diverge_independently(device: str, family: str) -> None:
    engine = engine_for(family, device)
    (parent,), logits = engine.prefill(prompts(6))
    parent.token_ids.append(int(logits.argmax()))
    child = engine.fork(parent)
    child.token_ids[-1] = (child.token_ids[-1] + 1) % VOCABULARY
    for _ in range(4):
        check_step(family, device, [parent, child], engine.extend([parent, child]))
    assert engine.kv.path_counts["copy_on_write"] == 1
    for session in (parent, child):
        engine.release(session)
    assert engine.kv.num_free_blocks(0) == engine.kv.max_blocks_per_layer - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        AppendPolicy(triton=False, batched=False),
        AppendPolicy(triton=False, batched_rollover=False, batched_copy_on_write=False),
        AppendPolicy(triton=False, identity=False),
        AppendPolicy(triton=False, scalar_position=False),
    ],
    ids=["per token", "separate", "gather", "vector"],
)
def test_every_append_policy_matches_transformers(device: str, policy: AppendPolicy) -> None:
    engine = engine_for("gpt2", device, groups_of=1, policy=policy)
    sessions, logits = engine.prefill(prompts(3, 4, 4))
    for _ in range(5):
        check_step("gpt2", device, sessions, logits)
        logits = engine.extend(sessions)
