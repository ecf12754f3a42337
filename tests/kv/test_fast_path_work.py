"""Operations dispatched by the fast paths.

Identity: no gather, the caller's keys are used directly. Constant position: the position is a
number, and no tensor of positions exists.
"""

from __future__ import annotations

import pytest

from roseinfer import AppendPolicy, KVBlockManager, Path
from tests.kv.recording import Operations
from tests.kv.twins import Twins

EVEN = (2, 2, 2)
UNEVEN = (1, 2, 3)
SCALAR = {True: Path.TRITON_FULL_BATCH, False: Path.TORCH_SCALAR}
VECTOR = {True: Path.TRITON_IDENTITY_POS, False: Path.TORCH_VECTOR}
GATHER = {True: Path.TRITON_GATHER, False: Path.TORCH_GATHER}

triton_or_torch = pytest.mark.parametrize("triton", [True, False], ids=["triton", "torch"])


def uploads(device: str) -> int:
    """Return the number of index uploads per plan: none on a CPU."""
    return int(device == "cuda")


def record_append(twins: Twins, operations: Operations, path: Path) -> tuple[int, int]:
    """Append one token to all; return the addresses of the key and value passed."""
    key, value = twins.token(len(twins.fast_lists)), twins.token(len(twins.fast_lists))
    before = twins.fast.path_counts[path]
    with operations:
        twins.fast.append_token_batch(twins.layer, twins.fast_lists, key, value)
    assert twins.fast.path_counts[path] == before + 1
    return key.data_ptr(), value.data_ptr()


def test_full_batch_kernel_gets_block_indices_and_a_number(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(device, lengths=EVEN)
    operations = Operations(monkeypatch)
    addresses = record_append(twins, operations, Path.TRITON_FULL_BATCH)
    assert not operations.beyond("copy_")
    assert operations.count("copy_") == uploads(device)
    (launch,) = operations.launches
    assert (launch["key"].data_ptr(), launch["value"].data_ptr()) == addresses
    assert launch["block_idx"].tolist() == [ids[0] % 24 for ids in twins.fast_lists]
    assert launch["pos"] == 2


def test_torch_scalar_path_writes_at_a_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(device, AppendPolicy(triton=False), lengths=EVEN)
    operations = Operations(monkeypatch)
    addresses = record_append(twins, operations, Path.TORCH_SCALAR)
    assert not operations.beyond("copy_", "index_copy_")
    assert operations.count("copy_") == uploads(device)
    written = [args[3] for name, args in operations.calls if name == "index_copy_"]
    assert tuple(new.data_ptr() for new in written) == addresses
    assert not operations.launches


@triton_or_torch
@pytest.mark.parametrize("lengths", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_identity_path_gathers_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch, triton: bool, lengths: tuple[int, ...]
) -> None:
    twins = Twins(device, AppendPolicy(triton=triton), lengths=lengths)
    operations = Operations(monkeypatch)
    record_append(twins, operations, (SCALAR if lengths is EVEN else VECTOR)[triton])
    assert operations.count("index_select") == 0


def test_gather_path_gathers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder used above does detect a gather."""
    twins = Twins(device, AppendPolicy(triton=False, identity=False), lengths=EVEN)
    operations = Operations(monkeypatch)
    record_append(twins, operations, Path.TORCH_GATHER)
    assert operations.count("index_select") == 2


def test_gather_kernel_gets_rows_and_positions(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(device, AppendPolicy(identity=False), lengths=UNEVEN)
    operations = Operations(monkeypatch)
    record_append(twins, operations, Path.TRITON_GATHER)
    (launch,) = operations.launches
    assert (launch["rows"].tolist(), launch["positions"].tolist()) == ([0, 1, 2], [1, 2, 3])


@triton_or_torch
@pytest.mark.parametrize(
    ("paths", "lengths", "identity", "columns"),
    [(SCALAR, EVEN, True, 1), (VECTOR, UNEVEN, True, 2), (GATHER, UNEVEN, False, 3)],
    ids=["scalar", "vector", "gather"],
)
def test_only_the_indices_a_path_reads_are_staged(
    device: str,
    triton: bool,
    paths: dict[bool, Path],
    lengths: tuple[int, ...],
    identity: bool,
    columns: int,
) -> None:
    twins = Twins(device, AppendPolicy(triton=triton, identity=identity), lengths=lengths)
    plan = twins.fast.plan_append(twins.layer, twins.fast_lists)
    assert plan.path is paths[triton]
    assert plan.staged_indices is not None
    assert len(plan.staged_indices.columns) == columns


@triton_or_torch
def test_index_buffers_are_reused(device: str, triton: bool) -> None:
    """In steady state no index tensor is allocated: the ring's buffers are reused."""
    twins = Twins(device, AppendPolicy(triton=triton), lengths=EVEN, max_blocks_per_layer=128)

    def staged_storages(kv: KVBlockManager) -> set[int]:
        storages = set()
        for _ in range(80):
            staged = kv.plan_append(twins.layer, twins.fast_lists).staged_indices
            assert staged is not None
            storages.add(staged.columns[0].untyped_storage().data_ptr())
        return storages

    assert len(staged_storages(twins.fast)) == 1
