"""Checks of code that no history can reach.

Offsets beyond 32 bits: the caches are a few blocks of one tensor of eight gigabytes, of which
almost nothing is ever accessed. They begin in its middle, so that an offset that wraps around is
still inside, and the check fails instead of the process.

Capture of a CUDA graph with live sequences, without a GPU: the step of a capture is run on emptied
rows.

More rows than a tile has, and several tiles for one expert: texts of mixes are too short for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.mutants.hunt import Failure, Stop, guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.mutants.tally import Tally

_FAR = 2**31
_BLOCKS = 2049
_BLOCK_STRIDE = _FAR // (_BLOCKS - 1)
"""Distance of blocks in elements: the last block begins where 32 bits end."""
_TOKENS, _DIMS = 4, 8


def run(name: str | None, tally: Tally) -> Failure | None:
    """Run one check, or all of them."""
    for check in CHECKS if name is None else [name]:
        tally.check = f"directed: {check}"
        try:
            with guarded(tally, 1):
                CHECKS[check]()
        except Stop as stop:
            return Failure(tally.check, stop.message)
    return None


def _caches() -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.empty(2 * _FAR + 2 * _BLOCK_STRIDE, dtype=torch.float16)
    keys, values = (
        memory.as_strided(
            (1, _BLOCKS, 1, _TOKENS, _DIMS),
            (0, _BLOCK_STRIDE, _BLOCK_STRIDE // 2, _DIMS, 1),
            _FAR + at * _BLOCK_STRIDE // 4,
        )
        for at in range(2)
    )
    for cache in (keys, values):
        for block in (0, _BLOCKS - 2, _BLOCKS - 1):
            cache[:, block] = block + 1
    return keys, values


def far_appends() -> None:
    """Append with every kernel to the last two blocks."""
    from roseinfer.kernels.triton import append

    index = {"block_idx": torch.tensor([_BLOCKS - 1, _BLOCKS - 2])}
    positions = {"pos": torch.tensor([1, 1])}
    rows = {"batch_idx": torch.tensor([0, 1])}
    calls: list[tuple[Callable[..., None], dict[str, Any]]] = [
        (append.kv_append_triton, {**index, **positions, **rows}),
        (append.kv_append_triton_identity_pos, {**index, **positions}),
        (append.kv_append_triton_full_batch, {**index, "pos": 1}),
    ]
    new = torch.arange(2 * _DIMS, dtype=torch.float16).view(2, 1, _DIMS)
    for kernel, arguments in calls:
        keys, values = _caches()
        kernel(
            k_cache_layer=keys[0],
            v_cache_layer=values[0],
            key_new=new,
            value_new=new + 100,
            **arguments,
        )
        for cache, tokens in ((keys, new), (values, new + 100)):
            for row, block in enumerate(index["block_idx"].tolist()):
                expected = torch.full((_TOKENS, _DIMS), block + 1.0, dtype=torch.float16)
                expected[1] = tokens[row, 0]
                assert torch.equal(cache[0, block, 0], expected), (
                    f"{kernel.__name__}: block {block}"
                )


def far_clones() -> None:
    """Copy the first block to the last and back."""
    from roseinfer.kernels.triton.clone import kv_clone_triton

    for source, target in ((0, _BLOCKS - 1), (_BLOCKS - 1, 0)):
        caches = _caches()
        kv_clone_triton(
            k_cache=caches[0],
            v_cache=caches[1],
            source=torch.tensor([source]),
            target=torch.tensor([target]),
        )
        for cache in caches:
            assert (cache[0, target] == source + 1).all(), f"block {source} did not reach {target}"


def capture_with_live_sequences() -> None:
    """Capture with live sequences: their blocks and their next tokens do not change."""
    from roseinfer import LLM, SamplingParams
    from roseinfer.decode.graphs import StepKind
    from roseinfer.decode.step import Resident, ResidentDecode

    greedy = SamplingParams(temperature=0)

    def decode_tokens(*, capture: bool) -> list[list[int]]:
        llm = LLM("tiny", device="cpu", block_size=4, kv_cache_tokens=64)
        sessions, kv = llm.engine.sequence_runner, llm.engine.sequence_runner.kv
        decode = ResidentDecode(sessions.model, sessions.attention, 4, graphs=False)
        sequences, logits = sessions.prefill([[1, 2, 3], [4, 5]])
        residents = [Resident(each, greedy, 0, 64, len(each.token_ids)) for each in sequences]
        decode.add_sequences(residents, logits.argmax(-1))
        tokens = [decode.launch(residents, 0).wait()]
        if capture:
            before = [cache[:, 1:].clone() for cache in (kv.keys, kv.values)]
            with decode.slots.rows.all_padding():
                decode.steps.step(4, StepKind(greedy=True))
            for cache, content in zip((kv.keys, kv.values), before, strict=True):
                assert torch.equal(cache[:, 1:], content), (
                    "a block of a live sequence was written to"
                )
        return tokens + [decode.launch(residents, 0).wait() for _ in range(3)]

    assert decode_tokens(capture=True) == decode_tokens(capture=False), (
        "live sequences have other tokens after a capture"
    )


def experts_of_many_rows() -> None:
    """Route many rows to experts: each row has the same result as among few."""
    from roseinfer.kernels.triton.experts import expert_down, expert_gate_up, route_rows

    torch.manual_seed(0)
    num_rows, few, num_experts, most, width, inner = 100, 10, 4, 3, 24, 16
    experts = torch.rand(num_rows, num_experts).argsort(-1)[:, :most].to(torch.int32)
    x, weights = torch.randn(num_rows, width), torch.rand(num_rows, most)
    gate_up_weight = torch.randn(num_experts, 2 * inner, width)
    down = torch.randn(num_experts, width, inner)

    def routed(rows: slice) -> torch.Tensor:
        visits = route_rows(experts[rows], num_experts)
        between = expert_gate_up(x[rows], gate_up_weight, visits)
        return expert_down(between, down, weights[rows], visits)

    expected = [routed(slice(at, at + few)) for at in range(0, num_rows, few)]
    actual = routed(slice(num_rows))
    assert torch.allclose(actual, torch.cat(expected, 1), atol=1e-4), (
        "a row has another result among many rows"
    )


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (far_appends, far_clones, capture_with_live_sequences, experts_of_many_rows)
}
