"""Payloads: tokens are encoded once, and callers do not affect each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pytest_roseinfer import CacheSpec
from pytest_roseinfer.capabilities.payload import ANY_NAN, Payload, Poison, poison, same_bits

SPEC = CacheSpec(num_layers=2, num_heads=3, head_dim=5, block_size=4, num_blocks=8)


@pytest.mark.parametrize("finite", [True, False])
def test_payload_does_not_depend_on_earlier_calls(finite: bool) -> None:
    reused = Payload(SPEC, finite)
    for tokens in ([7, 3], [], [3], [9, 7, 3, 9]):
        layers, expected = reused.all_layers(tokens), Payload(SPEC, finite).all_layers(tokens)
        assert all(map(same_bits, layers, expected))
        for layer in range(SPEC.num_layers):
            of_layer = reused.layer(tokens, layer)
            assert all(
                same_bits(one, all_of[layer])
                for one, all_of in zip(of_layer, expected, strict=True)
            )
            for tensor in (*layers, *of_layer):
                tensor.fill_(float("nan"))


def test_payload_elements_are_distinct() -> None:
    both = torch.stack(Payload(CacheSpec(num_layers=2, dtype="float32")).all_layers([0, 1, 65536]))
    assert len(set(both.flatten().tolist())) == both.numel()


# ------------------------------------------------------------------ messages about a wrong row


ROW_SPEC = CacheSpec(num_layers=2, num_heads=2, head_dim=4, dtype="float32")
KNOWN_TOKENS = [3, 4, 65536]
Row = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def row_of(keys: torch.Tensor, layer: int, token: int, head: int) -> torch.Tensor:
    return keys[layer, KNOWN_TOKENS.index(token), head]


@pytest.mark.parametrize(
    ("read_row", "message"),
    [
        (lambda k, _: row_of(k, 0, 4, 1), "token 4: one position off"),
        (lambda k, _: row_of(k, 0, 65536, 1), "sequence 1, token 0"),
        (lambda k, _: row_of(k, 1, 3, 1), "token 3, layer 1, head 1, K: another layer's"),
        (lambda k, _: row_of(k, 0, 3, 0), "token 3, layer 0, head 0, K: another head's"),
        (lambda _, v: row_of(v, 0, 3, 1), "token 3, layer 0, head 1, V: V in place of K"),
        (lambda k, _: torch.zeros_like(row_of(k, 0, 3, 1)), "zeros"),
        (
            lambda k, _: row_of(k, 0, 3, 1).bfloat16().float(),
            r"that rounded to bfloat16, up to 0\.00\d+ off",
        ),
        (
            lambda k, _: (1e30 * row_of(k, 0, 3, 1)).half().float(),
            r"bits no token has \(\[.*\]\.\.\.\), in part not finite",
        ),
        (
            lambda k, _: row_of(k, 0, 3, 1) * torch.tensor([1, 0, 0, 0]) + 0.0,
            "that but for elements 1 to 3: zeros",
        ),
        (
            lambda k, _: row_of(k, 0, 3, 1) + torch.tensor([2, 0, 0, 2]),
            r"that but for elements 0, 3: bits no token has \(\[.*\]\.\.\.\)",
        ),
        (lambda k, _: row_of(k, 0, 3, 1) + 2, r"bits no token has \(\[.*\]\.\.\.\), up to 2 off"),
        (lambda k, _: row_of(k, 0, 3, 1) * float("nan"), re.escape(ANY_NAN)),
    ],
)  # fmt: skip
def test_mismatch_describes_the_wrong_row(read_row: Row, message: str) -> None:
    payload = Payload(ROW_SPEC)
    keys, values = payload.all_layers(KNOWN_TOKENS)
    mismatch = payload.describe_mismatch(
        row_of(keys, 0, 3, 1), read_row(keys, values), 0, 1, "K", KNOWN_TOKENS
    )
    assert mismatch.expected == "sequence 0, token 3"
    assert re.fullmatch(f"expected .*, found (sequence 0, )?{message}", mismatch.describe())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("why", Poison)
def test_poison_names_its_cause(why: Poison, dtype: torch.dtype) -> None:
    spec = replace(ROW_SPEC, dtype=str(dtype).removeprefix("torch."))
    row, payload = torch.empty(4, dtype=dtype), Payload(spec)
    poison(row, why)
    assert row.isnan().all()
    (right,) = payload.all_layers([3])[0][0]
    message = {
        each: payload.describe_mismatch(right[0], poisoned_copy(row, each), 0, 0, "K", [3]).actual
        for each in Poison
    }
    assert payload.describe_mismatch(right[0], row, 0, 0, "K", [3]).actual == message[why]
    assert len(set(message.values())) == len(Poison)
    mixed = torch.cat([row[:2], torch.full((2,), float("nan"), dtype=dtype)])
    assert (
        payload.describe_mismatch(right[0], mixed, 0, 0, "K", [3]).actual
        == f"{ANY_NAN} and {message[why]}"
    )


def poisoned_copy(row: torch.Tensor, why: Poison) -> torch.Tensor:
    row = row.clone()
    poison(row, why)
    return row


def test_mismatch_names_changed_bits_of_nan() -> None:
    payload = Payload(ROW_SPEC, finite=False)
    right = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
    read_row = right.clone()
    read_row.view(torch.int32)[1] += 5
    mismatch = payload.describe_mismatch(right, read_row, 0, 1, "K", KNOWN_TOKENS)
    assert (
        "found that but for the bits of NaN in elements 1, which a conversion through another "
        "dtype loses" in mismatch.describe()
    )
