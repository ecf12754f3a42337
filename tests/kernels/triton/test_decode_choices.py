"""Launch configurations of decode attention on a GPU (not interpreted)."""

from __future__ import annotations

import pytest

from roseinfer.kernels.triton import decode_attention as decode_triton
from roseinfer.kernels.triton.decode_attention import _num_splits, _warps
from roseinfer.kernels.triton.softmax import num_context_parts, tile_of_tokens


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_triton, "is_interpreted", lambda: False)


def test_few_kinds_of_kernels_whatever_the_contexts() -> None:
    """Each new number of programs is a kernel to compile, which delays a request."""
    for rows in (1, 8, 12, 96, 132, 396, 397, 3072):
        splits = [_num_splits(rows, num_context_parts(tokens)) for tokens in range(1, 70_000, 61)]
        assert set(splits) <= {1, 2, 4, 8, 16, 32}
        assert splits == sorted(splits)


def test_no_more_programs_than_fill_the_gpu_and_one_for_short_tables() -> None:
    assert [_num_splits(12 * sequences, 99) for sequences in (1, 2, 4, 8, 16, 17, 64)] == [
        32, 16, 8, 4, 2, 1, 1,
    ]  # fmt: skip
    assert [_num_splits(8, parts) for parts in (1, 2, 3, 4, 5, 33)] == [1, 2, 4, 4, 8, 32]


def test_smaller_programs_where_there_are_many() -> None:
    assert [_warps(programs, 64) for programs in (396, 397, 792, 793)] == [4, 4, 4, 1]
    assert [_warps(programs, 128) for programs in (396, 397, 792, 793)] == [4, 2, 2, 2]


@pytest.mark.parametrize(("head_bytes", "tile"), [(16, 64), (256, 64), (512, 32), (4096, 16)])
def test_tiles_of_tokens_depend_on_the_heads_alone(head_bytes: int, tile: int) -> None:
    assert tile_of_tokens(head_bytes) == tile
