"""Every write path compared with ``append_token``, over dtypes and head sizes.

Counters are compared as a whole: a case that took another path than its own, or an additional one,
fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from roseinfer import AppendPolicy, Condition, Path
from tests.kv.twins import DTYPES, HEAD_DIMS, Twins

if TYPE_CHECKING:
    import torch

EVEN = (2, 2, 2)
UNEVEN = (1, 2, 3)


@dataclass(frozen=True)
class Case:
    policy: AppendPolicy
    lengths: tuple[int, ...]
    times: int = 1


WRITES = {
    Path.TRITON_FULL_BATCH: Case(AppendPolicy(), EVEN),
    Path.TRITON_IDENTITY_POS: Case(AppendPolicy(), UNEVEN),
    Path.TRITON_GATHER: Case(AppendPolicy(identity=False), UNEVEN),
    Path.TORCH_SCALAR: Case(AppendPolicy(triton=False), EVEN),
    Path.TORCH_VECTOR: Case(AppendPolicy(triton=False), UNEVEN),
    Path.TORCH_GATHER: Case(AppendPolicy(triton=False, identity=False), UNEVEN),
    Path.PER_TOKEN: Case(AppendPolicy(batched=False), UNEVEN, times=3),
}
CLONES = {
    Path.CLONE_TRITON: AppendPolicy(),
    Path.CLONE_TORCH: AppendPolicy(triton=False),
}

all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
all_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)
all_writes = pytest.mark.parametrize("path", WRITES)
all_clones = pytest.mark.parametrize("path", CLONES)


def test_every_declared_path_has_a_case() -> None:
    assert set(WRITES) | set(CLONES) == set(Path)


@all_writes
@all_dtypes
@all_head_dims
def test_write_matches_append_token(
    device: str, path: Path, dtype: torch.dtype, head_dim: int
) -> None:
    case = WRITES[path]
    twins = Twins(device, case.policy, dtype=dtype, head_dim=head_dim, lengths=case.lengths)
    assert twins.append() == {path: case.times, Condition.IN_PLACE: len(case.lengths)}
    twins.check()


@all_clones
@all_dtypes
@all_head_dims
def test_clone_matches_append_token(
    device: str, path: Path, dtype: torch.dtype, head_dim: int
) -> None:
    twins = Twins(device, CLONES[path], dtype=dtype, head_dim=head_dim, lengths=(3, 3))
    twins.fork(0)
    counts = twins.append([2, 1])
    write = Path.TRITON_FULL_BATCH if path is Path.CLONE_TRITON else Path.TORCH_SCALAR
    assert counts == {path: 1, write: 1, Condition.COPY_ON_WRITE: 1, Condition.IN_PLACE: 1}
    twins.check()


@all_writes
def test_batch_larger_than_a_tile_of_tokens(device: str, path: Path) -> None:
    """Several programs, the last of them partly filled."""
    case = WRITES[path]
    lengths = [case.lengths[row % 3] for row in range(131)]
    twins = Twins(device, case.policy, max_blocks_per_layer=140, lengths=lengths)
    assert twins.append()[path] == (131 if path is Path.PER_TOKEN else 1)
    twins.check()


@all_writes
@pytest.mark.parametrize("num_heads", [1, 12])
def test_one_and_many_heads(device: str, path: Path, num_heads: int) -> None:
    case = WRITES[path]
    twins = Twins(device, case.policy, num_heads=num_heads, lengths=case.lengths)
    assert twins.append()[path] == case.times
    twins.check()


@pytest.mark.parametrize(
    "policy",
    [AppendPolicy(), AppendPolicy(triton=False), AppendPolicy(batched=False)],
    ids=["triton", "torch", "per_token"],
)
def test_batch_of_one(device: str, policy: AppendPolicy) -> None:
    twins = Twins(device, policy, lengths=(2,))
    twins.append()
    twins.check()


@pytest.mark.parametrize("policy", [AppendPolicy(), AppendPolicy(triton=False)])
def test_blocks_of_one_token_are_full_at_once(device: str, policy: AppendPolicy) -> None:
    twins = Twins(device, policy, block_size=1, lengths=(1, 2, 0))
    twins.fork(0)
    counts = twins.append()
    assert counts[Condition.ROLLOVER_SHARED] == 2
    assert counts[Path.TRITON_FULL_BATCH] + counts[Path.TORCH_SCALAR] == 1
    twins.check()


@pytest.mark.parametrize("path", WRITES)
def test_long_run_of_batches_matches_append_token(device: str, path: Path) -> None:
    """Twelve steps cross block boundaries several times, at different steps per row."""
    case = WRITES[path]
    twins = Twins(device, case.policy, lengths=case.lengths)
    times = sum(twins.append()[path] for _ in range(12))
    assert times == 12 * case.times
    twins.check()


@pytest.mark.parametrize("policy", [AppendPolicy(), AppendPolicy(batched=False)])
def test_empty_batch_does_nothing(device: str, policy: AppendPolicy) -> None:
    twins = Twins(device, policy, lengths=(2,))
    assert not twins.append([])
    twins.check()
