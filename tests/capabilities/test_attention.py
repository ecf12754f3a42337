"""Attention over a cache: right caches pass, and each usual mistake is reported by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import roseinfer.kernels.triton.decode_attention as decode
from pytest_roseinfer import CacheSpec, Divergence, History, KVCacheAdapter, run_history
from pytest_roseinfer.capabilities.attention import attention_by_formula
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import Append, Prefill, Reserve
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager, PerLayerManager
from tests.capabilities.caches import attending_caches as caches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_roseinfer.capabilities.operation import Operation
    from tests.project import Project

DTYPES = ("float32", "float16", "bfloat16")
SPEC = CacheSpec(num_layers=2, num_heads=2, head_dim=8, block_size=4, num_blocks=12)
ALL = Append((2, 0, 1))
HISTORY = History(
    SPEC, (ALL, Append((2, 0)), ALL, Append((1,)), ALL, Free(1), *[Append((0, 2))] * 6)
)


def with_dtype(dtype: str) -> History:
    return replace(HISTORY, spec=replace(SPEC, dtype=dtype))


def failure_message(adapter: type[KVCacheAdapter], history: History) -> str:
    with pytest.raises(Divergence) as failure:
        run_history(adapter, history)
    return failure.value.summary


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_attention_passes(dtype: str) -> None:
    counts = run_history(caches.AttendingCache, with_dtype(dtype))
    assert counts["in_one_go"] + counts["one_by_one"] >= HISTORY.size // 4


MESSAGES = {
    caches.SwapsHeads: ", as it would be with the KV heads in reverse order",
    caches.GroupsQueryHeadsTheOtherWay: "of KV head",
    caches.OmitsTheLastToken: ", as it would be without the last token",
    caches.AttendsToAnUnwrittenToken: "found nan: something was read that is not stored",
    caches.MasksScoresOnly: "found nan: something was read that is not stored",
    caches.ReadsKeysOfAnotherSequence: "attend: sequence ",
    caches.ReadsValuesOfAnotherSequence: "attend: sequence ",
    caches.ReturnsRowsInNameOrder: ", as it would be over sequence ",
    caches.ReadsTheFirstLayer: ", as it would be in layer 0",
    caches.ForgetsTheScale: "attend: sequence ",
    caches.StoresTheQuery: "attend changed what is stored",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("adapter", "message"), MESSAGES.items(), ids=lambda it: getattr(it, "__name__", "")
)
def test_attention_mistake_is_reported(
    adapter: type[KVCacheAdapter], message: str, dtype: str
) -> None:
    assert message in failure_message(adapter, with_dtype(dtype))


def test_same_history_gives_the_same_message() -> None:
    first, again = (failure_message(caches.ReadsKeysOfAnotherSequence, HISTORY) for _ in range(2))
    assert first == again


def test_attention_is_not_checked_on_payloads_of_any_bits() -> None:
    """Such payloads contain NaN and infinities, for which attention is not defined."""
    run_history(caches.OmitsTheLastToken, replace(HISTORY, finite=False))


def test_formula_equals_scaled_dot_product_attention() -> None:
    query, keys, values = (torch.randn(6, 5), torch.randn(7, 3, 5), torch.randn(7, 3, 5))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        enable_gqa=True,
    )  # fmt: skip
    torch.testing.assert_close(attention_by_formula(query, keys, values).float(), expected[0, :, 0])


SHARED = (Prefill(0, 6), Fork(0, 1), Append((1, 0)), Append((0,)))
KINDS = (GroupedManager, PerLayerManager)


def on_manager(steps: Sequence[Operation], device: str, *, triton: bool) -> History:
    options = {name: values[0] for name, values in GroupedManager.option_choices.items()}
    spec = replace(SPEC, device=device, options={**options, "triton": triton})
    return History(spec, tuple(steps))


@pytest.mark.parametrize("kind", KINDS)
def test_managers_attend_with_the_kernel_or_the_reference(
    kind: type[KVCacheAdapter], device: str
) -> None:
    names = {"attention_decode_triton", "attention_reference"}
    for triton, name in ((True, "attention_decode_triton"), (False, "attention_reference")):
        counts = run_history(kind, on_manager(SHARED, device, triton=triton))
        assert counts.keys() & names == {name}


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_kernel_of_the_managers_is_reported(
    kind: type[KVCacheAdapter], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Callable[..., torch.Tensor] = decode.paged_attention_decode

    def short(*arguments: Any) -> torch.Tensor:
        *before, lengths, traits = arguments
        return right(*before, lengths - 1, traits)

    monkeypatch.setattr(decode, "paged_attention_decode", short)
    message = failure_message(kind, on_manager(SHARED, device, triton=True))
    assert ", as it would be without the last token" in message


def test_reserved_sequences_are_not_attended(device: str) -> None:
    waiting = (Prefill(0, 3), Append((0,)), Append((0,)), Reserve((0,), (2,)))
    counts = run_history(GroupedManager, on_manager(waiting, device, triton=False))
    assert not counts["attention_reference"]


def test_search_counts_attention_and_reports_its_failure(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_mine="""
            from caches.attending_caches import AttendingCache, OmitsTheLastToken
            from pytest_roseinfer import conformance

            TestAttendingCache = conformance(AttendingCache)
            TestMissesTheLastToken = conformance(OmitsTheLastToken)
        """
    )
    search = ("--roseinfer-examples=40", "--roseinfer-seed=1")
    result = project.pytest("-v", "-k", "histories", *search)
    result.assert_outcomes(passed=1, failed=1, deselected=8)
    result.stdout.fnmatch_lines(
        [
            "attend: sequence *, layer *, query head * of KV head *, element * (* wrong): expected "
            "*, found *, as it would be without the last token",
            "tested: make *, append *, peek *, table *, ledger *, free *, path_counts *, attend *",
            "path * in_one_go * one_by_one * equal",
        ]
    )
