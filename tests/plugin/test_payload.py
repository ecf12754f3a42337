"""Tokens are coded once, and a caller sees nothing of what others asked for or changed."""

from __future__ import annotations

import pytest
import torch

from pytest_roseinfer import CacheSpec
from pytest_roseinfer.cases.payload import Payload, same_bits

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
