"""Which products of many rows pairs of programs take: what they compute, where they are fastest."""

from __future__ import annotations

import pytest
import torch

from roseinfer.kernels.cuda import paired, tensor_maps
from roseinfer.kernels.cuda.paired import PairedSizes, can_add_paired_gemm, can_pair_gate_up


@pytest.fixture(autouse=True)
def on_a_gpu_with_warpgroups(monkeypatch: pytest.MonkeyPatch) -> list[PairedSizes]:
    """Have the kernel compiled, as it were; return for what."""
    compiled: list[PairedSizes] = []

    def load(sizes: PairedSizes, device: torch.device) -> object:
        del device
        compiled.append(sizes)
        return object()

    monkeypatch.setattr(paired.KERNEL, "load", load)
    monkeypatch.setattr(tensor_maps, "supports_wgmma", lambda _, dtype: dtype is torch.bfloat16)
    return compiled


def numbers(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


def adds(
    rows: int = 1024, inputs: int = 2048, outputs: int = 2048, parts: int = 4, beside: int = 0
) -> bool:
    """Ask of a residual stream and rows, which are further apart by so many numbers."""
    residual = numbers(rows, outputs + beside)[:, :outputs]
    x = numbers(rows, inputs + beside)[:, :inputs]
    return can_add_paired_gemm(residual, x, numbers(outputs, inputs), parts)


def test_many_rows_are_added_in_pairs(on_a_gpu_with_warpgroups: list[PairedSizes]) -> None:
    assert adds()
    assert adds(beside=8)
    assert on_a_gpu_with_warpgroups[0] == PairedSizes.choose(gates=False)


def test_few_tiles_go_elsewhere(on_a_gpu_with_warpgroups: list[PairedSizes]) -> None:
    assert adds(rows=6 * 128)
    assert adds(rows=3 * 128, outputs=4096, parts=2)
    assert on_a_gpu_with_warpgroups
    on_a_gpu_with_warpgroups.clear()
    assert not adds(rows=5 * 128)
    assert not adds(rows=6 * 128, outputs=15 * 128)
    assert not on_a_gpu_with_warpgroups, "nothing is compiled in vain"


def test_what_cannot_be_cut_into_tiles_goes_elsewhere() -> None:
    assert adds(inputs=512)
    assert not adds(inputs=512 - 64), "parts of other than whole tiles"
    assert not adds(outputs=2048 + 32)
    assert not adds(beside=4), "rows that do not begin where the copy engine can fetch them"
    residual, odd = numbers(1024, 2048), numbers(2048, 2048 + 4)[:, :2048]
    assert can_add_paired_gemm(residual, numbers(1024, 2048), numbers(2048, 2048), 4)
    assert not can_add_paired_gemm(odd[:1024], numbers(1024, 2048), numbers(2048, 2048), 4)
    assert not can_add_paired_gemm(residual, odd[:1024], numbers(2048, 2048), 4)
    assert not can_add_paired_gemm(residual, numbers(1024, 2048), odd, 4)
    residual, x, weight = (
        numbers(*size, dtype=torch.float16) for size in ((1024, 2048), (1024, 64), (2048, 64))
    )
    assert not can_add_paired_gemm(residual, x, weight, 1)


def test_gates_go_in_pairs_too(on_a_gpu_with_warpgroups: list[PairedSizes]) -> None:
    assert can_pair_gate_up(numbers(256, 2048), numbers(2 * 8192, 2048))
    assert on_a_gpu_with_warpgroups == [PairedSizes.choose(gates=True)]
    assert not can_pair_gate_up(numbers(128, 2048), numbers(2 * 8192, 2048))
    assert not can_pair_gate_up(numbers(256, 2048), numbers(2 * 8192 + 64, 2048))
    assert not can_pair_gate_up(numbers(256, 2048 + 32), numbers(2 * 8192, 2048 + 32))


@pytest.mark.parametrize("gates", [False, True])
def test_a_program_finds_room(gates: bool) -> None:
    """A multiprocessor of these GPUs gives one program 227 KB."""
    assert PairedSizes.choose(gates=gates).shared_bytes <= 227 << 10
