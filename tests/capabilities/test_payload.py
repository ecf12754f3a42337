"""Tokens are coded once, and a caller sees nothing of what others asked for or changed."""

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
def test_what_was_asked_before_makes_no_difference(finite: bool) -> None:
    used = Payload(SPEC, finite)
    for tokens in ([7, 3], [], [3], [9, 7, 3, 9]):
        found, fresh = used.all_layers(tokens), Payload(SPEC, finite).all_layers(tokens)
        assert all(map(same_bits, found, fresh))
        for layer in range(SPEC.num_layers):
            of_layer = used.layer(tokens, layer)
            assert all(
                same_bits(one, all_of[layer]) for one, all_of in zip(of_layer, fresh, strict=True)
            )
            for tensor in (*found, *of_layer):
                tensor.fill_(float("nan"))


def test_every_element_of_every_token_differs() -> None:
    both = torch.stack(Payload(CacheSpec(num_layers=2, dtype="float32")).all_layers([0, 1, 65536]))
    assert len(set(both.flatten().tolist())) == both.numel()


# -------------------------------------------------------------------- what is said of a wrong row


LIKE = CacheSpec(num_layers=2, num_heads=2, head_dim=4, dtype="float32")
KNOWN = [3, 4, 65536]
Row = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of(keys: torch.Tensor, layer: int, token: int, head: int) -> torch.Tensor:
    return keys[layer, KNOWN.index(token), head]


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (lambda k, _: of(k, 0, 4, 1), "token 4: one position off"),
        (lambda k, _: of(k, 0, 65536, 1), "sequence 1, token 0"),
        (lambda k, _: of(k, 1, 3, 1), "token 3, layer 1, head 1, K: another layer's"),
        (lambda k, _: of(k, 0, 3, 0), "token 3, layer 0, head 0, K: another head's"),
        (lambda _, v: of(v, 0, 3, 1), "token 3, layer 0, head 1, V: V in place of K"),
        (lambda k, _: torch.zeros_like(of(k, 0, 3, 1)), "zeros"),
        (
            lambda k, _: of(k, 0, 3, 1).bfloat16().float(),
            r"that rounded to bfloat16, up to 0\.00\d+ off",
        ),
        (
            lambda k, _: (1e30 * of(k, 0, 3, 1)).half().float(),
            r"bits no token has \(\[.*\]\.\.\.\), in part not finite",
        ),
        (
            lambda k, _: of(k, 0, 3, 1) * torch.tensor([1, 0, 0, 0]) + 0.0,
            "that but for elements 1 to 3: zeros",
        ),
        (
            lambda k, _: of(k, 0, 3, 1) + torch.tensor([2, 0, 0, 2]),
            r"that but for elements 0, 3: bits no token has \(\[.*\]\.\.\.\)",
        ),
        (lambda k, _: of(k, 0, 3, 1) + 2, r"bits no token has \(\[.*\]\.\.\.\), up to 2 off"),
        (lambda k, _: of(k, 0, 3, 1) * float("nan"), re.escape(ANY_NAN)),
    ],
)  # fmt: skip
def test_a_wrong_row_is_said_to_be_what_it_looks_like(got: Row, said: str) -> None:
    payload = Payload(LIKE)
    keys, values = payload.all_layers(KNOWN)
    found = payload.describe_mismatch(of(keys, 0, 3, 1), got(keys, values), 0, 1, "K", KNOWN)
    assert found.expected == "sequence 0, token 3"
    assert re.fullmatch(f"expected .*, found (sequence 0, )?{said}", found.describe())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("why", Poison)
def test_poison_says_how_it_came_there(why: Poison, dtype: torch.dtype) -> None:
    spec = replace(LIKE, dtype=str(dtype).removeprefix("torch."))
    row, payload = torch.empty(4, dtype=dtype), Payload(spec)
    poison(row, why)
    assert row.isnan().all()
    (right,) = payload.all_layers([3])[0][0]
    said = {
        each: payload.describe_mismatch(right[0], poisoned(row, each), 0, 0, "K", [3]).found
        for each in Poison
    }
    assert payload.describe_mismatch(right[0], row, 0, 0, "K", [3]).found == said[why]
    assert len(set(said.values())) == len(Poison)
    mixed = torch.cat([row[:2], torch.full((2,), float("nan"), dtype=dtype)])
    assert (
        payload.describe_mismatch(right[0], mixed, 0, 0, "K", [3]).found
        == f"{ANY_NAN} and {said[why]}"
    )


def poisoned(like: torch.Tensor, why: Poison) -> torch.Tensor:
    row = like.clone()
    poison(row, why)
    return row


def test_other_bits_of_nan_are_said_to_be_that() -> None:
    payload = Payload(LIKE, finite=False)
    right = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
    got = right.clone()
    got.view(torch.int32)[1] += 5
    found = payload.describe_mismatch(right, got, 0, 1, "K", KNOWN)
    assert (
        "found that but for the bits of NaN in elements 1, which a conversion through another "
        "dtype loses" in found.describe()
    )
