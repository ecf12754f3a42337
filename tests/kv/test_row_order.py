"""Shortcuts whose conditions must be checked on all rows.

Identity and constant position are properties of all rows of a batch; each test puts the exception
where a check of first, last or neighbouring rows would miss it.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from roseinfer import AppendPolicy, Path
from tests.kv.twins import BLOCK_SIZE, Twins

ROWS = range(5)


@pytest.mark.parametrize("odd_row", ROWS)
@pytest.mark.parametrize(
    ("policy", "path"),
    [
        (AppendPolicy(), Path.TRITON_IDENTITY_POS),
        (AppendPolicy(triton=False), Path.TORCH_VECTOR),
    ],
)
def test_one_row_at_another_position_takes_the_vector_path(
    device: str, policy: AppendPolicy, path: Path, odd_row: int
) -> None:
    lengths = [2] * len(ROWS)
    lengths[odd_row] = 3
    twins = Twins(device, policy, lengths=lengths)
    assert twins.append()[path] == 1
    twins.check()


@pytest.mark.parametrize("odd_row", ROWS)
@pytest.mark.parametrize("triton", [True, False])
def test_one_row_is_appended_separately(device: str, odd_row: int, triton: bool) -> None:
    """Its neighbours must not move to its index, above all when it is a middle row."""
    policy = AppendPolicy(batched_copy_on_write=False, triton=triton)
    twins = Twins(device, policy, lengths=[2] * len(ROWS))
    twins.fork(odd_row)
    counts = twins.append(ROWS)
    assert counts[Path.PER_TOKEN] == 1
    assert counts[Path.TRITON_GATHER if triton else Path.TORCH_GATHER] == 1
    twins.check()


@pytest.mark.parametrize("triton", [True, False])
def test_several_middle_rows_are_appended_separately(device: str, triton: bool) -> None:
    policy = AppendPolicy(batched_rollover=False, triton=triton)
    twins = Twins(device, policy, lengths=(2, BLOCK_SIZE, 1, 0, BLOCK_SIZE, 2))
    assert twins.append()[Path.PER_TOKEN] == 3
    twins.check()


@pytest.mark.parametrize("order", list(permutations(range(4), 3)))
def test_permuted_subset_of_the_sequences(device: str, order: tuple[int, ...]) -> None:
    """A sequence's input row does not follow from its age or its block ids."""
    twins = Twins(device, AppendPolicy(), lengths=(1, 2, 2, 3))
    assert twins.append(order)[Path.TRITON_IDENTITY_POS] == 1
    twins.check()


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize(
    ("policy", "path"),
    [(AppendPolicy(), Path.TRITON_FULL_BATCH), (AppendPolicy(triton=False), Path.TORCH_SCALAR)],
)
def test_permuted_batch_at_one_position(
    device: str, policy: AppendPolicy, path: Path, order: tuple[int, ...]
) -> None:
    twins = Twins(device, policy, lengths=(2, 2, 2))
    assert twins.append(order)[path] == 1
    twins.check()


@pytest.mark.parametrize("triton", [True, False])
def test_one_position_in_different_blocks_of_the_list(device: str, triton: bool) -> None:
    """Sequences of different length whose next tokens share a position use the scalar path."""
    twins = Twins(device, AppendPolicy(triton=triton), lengths=(1, 1 + BLOCK_SIZE, 1))
    path = Path.TRITON_FULL_BATCH if triton else Path.TORCH_SCALAR
    assert twins.append()[path] == 1
    twins.check()
