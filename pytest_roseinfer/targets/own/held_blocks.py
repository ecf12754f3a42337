"""Which blocks of roseinfer's cache are in use, in words."""

from __future__ import annotations

from typing import Any


def held_blocks(kv: Any) -> str:
    held = {
        layer: kv.max_blocks_per_layer - 1 - kv.num_free_blocks(layer)
        for layer in range(0, kv.num_layers, kv.layers_per_group)
    }
    return ", ".join(f"{count} blocks of layer {at}" for at, count in held.items() if count)
