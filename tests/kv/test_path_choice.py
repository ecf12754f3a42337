"""Paths chosen by policy and shape of a write, and taken by the cache."""

from __future__ import annotations

import pytest

from roseinfer import AppendPlan, AppendPolicy, Condition, Path, TritonUnavailable
from roseinfer.kv import storage
from roseinfer.kv.storage import choose_write_path
from tests.kv.twins import Twins

EVEN = True
UNEVEN = False


def chosen_path(
    policy: AppendPolicy, tokens: int, *, even: bool, identity: bool = True, triton: bool = True
) -> Path:
    plan = AppendPlan(
        0,
        blocks=list(range(tokens)),
        positions=[2 if even else row for row in range(tokens)],
        rows=None if identity else list(range(tokens)),
    )
    return choose_write_path(policy, plan, triton=triton)


@pytest.mark.parametrize(
    ("identity", "even", "triton", "path"),
    [
        (True, True, True, Path.TRITON_FULL_BATCH),
        (True, False, True, Path.TRITON_IDENTITY_POS),
        (False, False, True, Path.TRITON_GATHER),
        (False, True, True, Path.TRITON_GATHER),
        (True, True, False, Path.TORCH_SCALAR),
        (True, False, False, Path.TORCH_VECTOR),
        (False, False, False, Path.TORCH_GATHER),
        (False, True, False, Path.TORCH_GATHER),
    ],
)
def test_path_depends_on_the_shape_of_the_write(
    identity: bool, even: bool, triton: bool, path: Path
) -> None:
    assert chosen_path(AppendPolicy(), 8, even=even, identity=identity, triton=triton) is path


@pytest.mark.parametrize("triton", [True, False])
def test_scalar_position_requires_identity(triton: bool) -> None:
    policy = AppendPolicy(identity=False)
    path = Path.TRITON_GATHER if triton else Path.TORCH_GATHER
    assert chosen_path(policy, 8, even=EVEN, triton=triton) is path


THRESHOLDS = [
    ({"triton_min_batch": 3}, 2, EVEN, Path.TORCH_SCALAR),
    ({"triton_min_batch": 3}, 3, EVEN, Path.TRITON_FULL_BATCH),
    ({"triton_min_batch": 3}, 2, UNEVEN, Path.TORCH_VECTOR),
    ({"triton_min_batch": 3}, 3, UNEVEN, Path.TRITON_IDENTITY_POS),
    ({"triton_min_batch": 0}, 1, EVEN, Path.TRITON_FULL_BATCH),
    ({"triton_min_batch": 3, "triton_full_batch_min_batch": 2}, 1, EVEN, Path.TORCH_SCALAR),
    ({"triton_min_batch": 3, "triton_full_batch_min_batch": 2}, 2, EVEN, Path.TRITON_FULL_BATCH),
    ({"triton_min_batch": 3, "triton_full_batch_min_batch": 2}, 2, UNEVEN, Path.TORCH_VECTOR),
    ({"triton_min_batch": 2, "triton_full_batch_min_batch": 4}, 1, EVEN, Path.TORCH_SCALAR),
    ({"triton_min_batch": 2, "triton_full_batch_min_batch": 4}, 3, EVEN, Path.TRITON_IDENTITY_POS),
    ({"triton_min_batch": 2, "triton_full_batch_min_batch": 4}, 4, EVEN, Path.TRITON_FULL_BATCH),
    ({"triton_full_batch_min_batch": 0}, 1, EVEN, Path.TRITON_FULL_BATCH),
    ({"scalar_position": False}, 3, EVEN, Path.TRITON_IDENTITY_POS),
    ({"scalar_position": False, "triton": False}, 3, EVEN, Path.TORCH_VECTOR),
    ({"triton_min_batch": 1, "identity": False}, 1, EVEN, Path.TRITON_GATHER),
    ({"triton_min_batch": 2, "identity": False}, 1, EVEN, Path.TORCH_GATHER),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "batch", "even", "path"), THRESHOLDS)
def test_thresholds_count_the_tokens_of_the_write(
    device: str, settings: dict[str, int], batch: int, even: bool, path: Path
) -> None:
    """The cache itself appends, which shows that its policy determines the choice."""
    policy = AppendPolicy(**settings)  # type: ignore[arg-type]  # switches and numbers alike
    lengths = [2] * batch if even else [1 + row % 3 for row in range(batch)]
    twins = Twins(device, policy, lengths=lengths)
    assert twins.append()[path] == 1
    twins.check()


@pytest.mark.parametrize(("even", "path"), [(EVEN, Path.TORCH_SCALAR), (UNEVEN, Path.TORCH_VECTOR)])
def test_torch_writes_by_the_policy_where_no_kernel_can_run(
    device: str, even: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "unusable_reason", lambda _: f"no kernel before {path}")
    lengths = (2, 2) if even else (1, 2)
    with pytest.warns(TritonUnavailable, match=f"no kernel before {path}"):
        twins = Twins(device, AppendPolicy(), lengths=lengths)
    counts = twins.append()
    assert (counts[path], counts[Condition.TRITON_UNAVAILABLE]) == (1, 1)
    twins.check()


def test_rows_appended_separately_do_not_count_towards_the_threshold(device: str) -> None:
    policy = AppendPolicy(batched_copy_on_write=False, triton_min_batch=3)
    twins = Twins(device, policy, lengths=(2, 2, 2))
    twins.fork(0)
    counts = twins.append([0, 1, 2])
    assert (counts[Path.PER_TOKEN], counts[Path.TORCH_GATHER]) == (1, 1)
    twins.check()


def test_clone_follows_the_triton_switch_without_a_threshold(device: str) -> None:
    twins = Twins(device, AppendPolicy(triton_min_batch=100), lengths=(2,))
    twins.fork(0)
    counts = twins.append([0])
    assert (counts[Path.CLONE_TRITON], counts[Path.TORCH_SCALAR]) == (1, 1)
    twins.check()
