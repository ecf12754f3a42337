"""Paged kernels: the how-to's adapter drives them with the harness's own pages."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_roseinfer import CacheSpec, Divergence, KVCacheAdapter, conformance, run_history
from pytest_roseinfer import settings as options
from pytest_roseinfer.targets.flashinfer_pages import FlashInferAdapter
from tests.capabilities.test_truncation import short_run as short_run
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Ints = Sequence[int]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "block-managers.md"


def allocate(spec: CacheSpec) -> torch.Tensor:
    pages = (spec.num_layers, spec.num_blocks, spec.num_heads, spec.block_size, spec.head_dim)
    return torch.zeros((2, *pages), dtype=getattr(torch, spec.dtype), device=spec.device)


def append(
    cache: torch.Tensor,
    tables: Sequence[Ints],
    lengths: Ints,
    counts: Ints,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    size, row = cache.shape[4], 0
    for table, length, count in zip(tables, lengths, counts, strict=True):
        for at in range(length - count, length):
            cache[0, :, table[at // size], :, at % size] = key[:, row].to(cache.dtype)
            cache[1, :, table[at // size], :, at % size] = value[:, row].to(cache.dtype)
            row += 1


def decode(
    cache: torch.Tensor, tables: Sequence[Ints], lengths: Ints, query: torch.Tensor
) -> torch.Tensor:
    output = torch.empty_like(query)
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        keys, values = (
            part[list(table)].transpose(1, 2).flatten(0, 1)[:length].double() for part in cache
        )
        times = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
        scores = torch.einsum("hd,thd->ht", query[row].double(), keys) * query.shape[2] ** -0.5
        output[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
    return output


def append_without_the_last(cache: torch.Tensor, *arguments: Any) -> None:
    """Append without the last of several tokens."""
    tables, lengths, counts, key, value = arguments
    if counts[-1] > 1:
        counts = [*counts[:-1], counts[-1] - 1]
        lengths = [*lengths[:-1], lengths[-1] - 1]
    append(cache, tables, lengths, counts, key, value)


def decode_a_page_too_far(
    cache: torch.Tensor, tables: Sequence[Ints], lengths: Ints, query: torch.Tensor
) -> torch.Tensor:
    """Attend to the whole last page."""
    size = cache.shape[3]
    return decode(cache, tables, [-(-length // size) * size for length in lengths], query)


def adapter(
    append: Callable[..., None] = append, decode: Callable[..., torch.Tensor] = decode
) -> type[KVCacheAdapter]:
    """Return the adapter of the page."""
    page = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from pytest_roseinfer import PagedK.*?)```", page, re.S)
    kernels = SimpleNamespace(allocate=allocate, append=append, decode=decode)
    names: dict[str, Any] = {"my_kernels": kernels, "__name__": __name__}
    exec(example, names)
    page_adapter: type[KVCacheAdapter] = names["MyKernels"]
    return page_adapter


@pytest.mark.usefixtures("short_run")
def test_right_kernels_pass() -> None:
    options.set_current(options.Settings(examples=10, steps=8, seed=1))
    tests = conformance(adapter())()
    tests.test_histories()
    tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.parametrize(
    "wrong", [adapter(append_without_the_last), adapter(decode=decode_a_page_too_far)]
)
def test_broken_kernels_fail(wrong: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(wrong, 100, 1, partial(run_history, wrong))


def test_missing_flashinfer_names_the_command_to_install_it() -> None:
    spec = CacheSpec(
        options={name: each[0] for name, each in FlashInferAdapter.option_choices.items()}
    )
    with pytest.raises(
        ModuleNotFoundError, match=r"pip install flashinfer-python.*--roseinfer-gpu"
    ):
        FlashInferAdapter().make(spec)
