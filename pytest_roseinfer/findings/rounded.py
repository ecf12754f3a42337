"""What a quantised cache may read back for a token: its values, give or take its tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_roseinfer.cases.payload import Payload
    from pytest_roseinfer.oracle.oracle import Oracle


def beyond(
    payload: Payload, oracle: Oracle, seq: int, layer: int, kind: str, found: torch.Tensor
) -> torch.Tensor:
    """Say for each ``[token, head]`` that is found whether it is further off than it may be."""
    tokens = oracle.tokens(seq)[: len(found)]
    want = _of_kind(payload, tokens, layer, kind).double()
    limits = _limits(payload, oracle, seq, layer, kind)[: len(found)]
    return ~((found.double() - want).abs() <= limits[:, None, None]).all(-1)  # NaN is as well


def _limits(payload: Payload, oracle: Oracle, seq: int, layer: int, kind: str) -> torch.Tensor:
    assert payload.tolerance
    if payload.tolerance.over == "token":
        greatest = _of_kind(payload, oracle.tokens(seq), layer, kind).abs().amax((1, 2)).double()
    else:
        pages = oracle.sequences[seq]
        of_page = [
            _of_kind(payload, [*page.tokens, *page.cut], layer, kind).abs().max().double()
            for page in pages
        ]
        lengths = [len(oracle.tokens_on(seq, at)) for at in range(len(pages))]
        greatest = torch.stack(of_page).repeat_interleave(torch.tensor(lengths))
    return greatest * payload.tolerance.of_greatest


def _of_kind(payload: Payload, tokens: list[int], layer: int, kind: str) -> torch.Tensor:
    return payload.layer(tokens, layer)["KV".index(kind)]
