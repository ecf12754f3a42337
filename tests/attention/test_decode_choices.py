"""How decode attention is cut up on a GPU, where its kernel is not interpreted."""

from __future__ import annotations

import pytest

from roseinfer.kernels import attend_decode as decode_triton
from roseinfer.kernels.attend_decode import _num_parts, _tile


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_triton, "is_interpreted", lambda: False)


def test_few_kinds_of_kernels_whatever_the_contexts() -> None:
    """Every new number of parts is a kernel to compile, for which a request waits."""
    for rows in (1, 8, 12, 96, 132, 396, 397, 3072):
        parts = [_num_parts(rows, tokens) for tokens in range(1, 70_000, 61)]
        assert set(parts) <= {1, 2, 4, 8, 16, 32}
        assert parts == sorted(parts)


def test_no_more_parts_than_fill_the_gpu_and_none_for_short_tables() -> None:
    assert [_num_parts(12 * sequences, 1024) for sequences in (1, 4, 8, 16, 17, 64)] == [
        16, 8, 4, 2, 1, 1,
    ]  # fmt: skip
    assert [_num_parts(8, tokens) for tokens in (1, 64, 65, 128, 129, 1 << 20)] == [
        1, 1, 2, 2, 4, 32,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("programs", "head_bytes", "tile"),
    [(1, 128, 64), (792, 256, 64), (793, 256, 32), (1, 512, 32), (5000, 512, 32), (1, 1024, 16)],
)
def test_large_tiles_where_programs_are_few_and_heads_are_small(
    programs: int, head_bytes: int, tile: int
) -> None:
    assert _tile(programs, head_bytes) == (tile, 4 if tile == 64 else 1)
