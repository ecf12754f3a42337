"""Compiling the kernels of steps before these are captured, in which no kernel runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.decode.graphs import StepGraphs
from roseinfer.kernels.kernel import TritonKernel
from tests.decode.residents import PROMPTS, Decoding, alone
from tests.interpreted import interpreted

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


@interpreted
def test_compiling_steps_changes_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles nothing on a CPU, so kernels are skipped here in its place."""
    skipped: list[str] = []

    def skip_kernels(work: Callable[[], object], device: torch.device) -> None:
        assert device.type == "cpu"
        with monkeypatch.context() as patch:
            patch.setattr(
                TritonKernel, "launch_in_order", lambda self, *_, **__: skipped.append(self.name)
            )
            work()

    monkeypatch.setattr("roseinfer.decode.graphs.compile_in_parallel", skip_kernels)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    decoding = Decoding("cpu", kernels=True)
    rows = decoding.decode.rows
    for prompt in PROMPTS[:3]:
        decoding.begin(prompt)
    decoding.step()
    before, tokens = rows._rows.clone(), rows.tokens.clone()
    counts = decoding.sessions.path_counts.copy()
    StepGraphs(decoding.decode.steps.step, rows, decoding.sessions.path_counts)._compile((6, 1))
    assert {"_decode_kernel", "_strip_kernel", "_advance_kernel"} <= {*skipped}
    assert torch.equal(rows._rows, before)
    assert torch.equal(rows.tokens, tokens)
    assert decoding.sessions.path_counts == counts
    for _ in range(2):
        decoding.step()
    assert decoding.texts() == [alone("cpu", prompt, 4) for prompt in PROMPTS[:3]]
