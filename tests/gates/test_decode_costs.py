"""Work of roseinfer's own decode steps, compared with baselines.

To accept other figures: ``pytest tests/gates --roseinfer-update-costs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch  # noqa: F401  (for the condition below)

from roseinfer import AppendPolicy
from tests.gates.decode_steps import STEPS

if TYPE_CHECKING:
    from pytest_roseinfer.gates.costs import Costs
    from pytest_roseinfer.gates.step_work import Step

pytestmark = [
    pytest.mark.roseinfer_costs(packages=["roseinfer"], keyed_by=["transformers"]),
    pytest.mark.skipif(
        "torch.cuda.is_available() and not config.getoption('--roseinfer-gpu')",
        reason="tests for a GPU compile the kernels, which can then not be interpreted",
    ),
]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", STEPS)
def test_with_torch_operations(
    roseinfer_costs: Costs, roseinfer_device: str, family: str, name: str
) -> None:
    policy = AppendPolicy(triton=False)
    step = STEPS[name](family, roseinfer_device, paged_attention=False, append_policy=policy)
    check(roseinfer_costs, name, step)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("name", STEPS)
def test_with_kernels(roseinfer_costs: Costs, roseinfer_device: str, name: str) -> None:
    step = STEPS[name](
        "llama", roseinfer_device, paged_attention=True, append_policy=AppendPolicy()
    )
    check(roseinfer_costs, name, step)


@pytest.mark.parametrize("name", ["steady", "boundary"])
def test_resident(roseinfer_costs: Costs, roseinfer_device: str, name: str) -> None:
    """Checks sequences with state on the device, whose tokens are read back a step later."""
    step = STEPS[name]("gpt2", roseinfer_device, resident_decode=True, run_ahead=1)
    check(roseinfer_costs, name, step)


def check(costs: Costs, name: str, step: Step) -> None:
    costs.check(name, step.run, tokens=step.tokens, before=step.before, counters=step.counters)
