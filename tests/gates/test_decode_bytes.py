"""Bytes moved by roseinfer's own decode steps, compared with baselines.

To accept other figures: ``pytest tests/gates --roseinfer-update-costs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch  # noqa: F401  (for the condition below)

from tests.gates.byte_steps import (
    FUSED,
    llama,
    narrow_gpt2,
    narrow_llama,
    narrow_mixtral,
    narrow_olmo2,
    narrow_qwen3,
    second_token,
)

if TYPE_CHECKING:
    from pytest_roseinfer.gates.costs import Costs
    from tests.gates.byte_steps import ByteStep

pytestmark = [
    pytest.mark.roseinfer_costs(keyed_by=["transformers"]),
    pytest.mark.skipif(
        "torch.cuda.is_available() and not config.getoption('--roseinfer-gpu')",
        reason="tests for a GPU compile the kernels, which can then not be interpreted",
    ),
]


def test_with_torch_operations(roseinfer_costs: Costs, roseinfer_device: str) -> None:
    own_modules: dict[str, Any] = {"paged_attention": False, "fused_model": False}
    check(roseinfer_costs, second_token(llama(roseinfer_device), roseinfer_device, **own_modules))


def test_with_kernels(roseinfer_costs: Costs, roseinfer_device: str) -> None:
    own_modules: dict[str, Any] = {"paged_attention": True, "fused_model": False}
    check(roseinfer_costs, second_token(llama(roseinfer_device), roseinfer_device, **own_modules))


def test_fused_and_resident(roseinfer_costs: Costs, roseinfer_device: str) -> None:
    """Checks the kernels of the fastest step, which is one graph replay on a GPU."""
    check(roseinfer_costs, second_token(narrow_gpt2(roseinfer_device), roseinfer_device, **FUSED))


def test_fused_llama(roseinfer_costs: Costs, roseinfer_device: str) -> None:
    check(roseinfer_costs, second_token(narrow_llama(roseinfer_device), roseinfer_device, **FUSED))


@pytest.mark.slow
def test_fused_qwen3(roseinfer_costs: Costs, roseinfer_device: str) -> None:
    check(roseinfer_costs, second_token(narrow_qwen3(roseinfer_device), roseinfer_device, **FUSED))


@pytest.mark.slow
def test_fused_olmo2(roseinfer_costs: Costs, roseinfer_device: str) -> None:
    check(roseinfer_costs, second_token(narrow_olmo2(roseinfer_device), roseinfer_device, **FUSED))


@pytest.mark.slow
def test_fused_mixtral(roseinfer_costs: Costs, roseinfer_device: str) -> None:
    model = narrow_mixtral(roseinfer_device)
    check(roseinfer_costs, second_token(model, roseinfer_device, **FUSED))


def check(costs: Costs, step: ByteStep) -> None:
    costs.check_bytes(
        "decode",
        step.step.run,
        tokens=step.step.tokens,
        before=step.step.before,
        weights=step.weights,
        cache=step.cache,
        context_bytes=step.context_bytes,
    )
