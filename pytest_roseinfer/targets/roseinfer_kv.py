"""This distribution's own block manager, in each of its arrangements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.targets.own.misused_manager import MisusedManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.adapters.cache import CacheSpec
    from roseinfer import AppendPlan


class PerLayerManager(MisusedManager):
    """``append_token_batch`` and ``register_prefill_layer``, a block list for every layer."""

    standard_bad_calls = (
        *MisusedManager.standard_bad_calls,
        "append_of_another_shape",
        "append_one_row_short",
        "append_of_integers",
    )

    def layers_per_group(self, spec: CacheSpec) -> int:  # noqa: ARG002
        return 1

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        lists = self.lists_of(seqs)
        for layer in range(self.spec.num_layers):
            rows = [None if seq is None else lists[seq][layer] for seq in seqs]
            self.manager.append_token_batch(layer, rows, key[layer], value[layer])
        self.lists.update(lists)

    def append_to_blocks(
        self, layer: int, lists: list[list[int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        rows = [self.ids(layer, blocks) for blocks in lists]
        self.manager.append_token_batch(layer, rows, key[layer], value[layer])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.lists[seq] = [
            self.manager.register_prefill_layer(
                layer, key[layer].transpose(0, 1)[None], value[layer].transpose(0, 1)[None]
            )
            for layer in range(self.spec.num_layers)
        ]


class GroupedManager(MisusedManager):
    """``plan_append`` once for a group of layers and ``write`` per layer.

    Four layers make two groups; fewer are one.
    """

    def layers_per_group(self, spec: CacheSpec) -> int:
        return 2 if spec.num_layers == 4 else spec.num_layers

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self.reserve(seqs, None), key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self.reserve(seqs, counts), key, value)

    def append_to_blocks(
        self,
        layer: int,
        lists: list[list[int]],
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
    ) -> None:
        """Plan the append, which is where a bad one is refused."""
        self.manager.plan_append(layer, [self.ids(layer, each) for each in lists])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def reserve(self, seqs: Sequence[int | None], counts: Sequence[int] | None) -> list[AppendPlan]:
        lists = self.lists_of(seqs)
        plans = []
        for group, first_layer in enumerate(self.first_layers):
            rows = [None if seq is None else lists[seq][group] for seq in seqs]
            plans.append(self.manager.plan_append(first_layer, rows, counts))
        self.lists.update(lists)
        return plans

    def fill(self, reservation: list[AppendPlan], key: torch.Tensor, value: torch.Tensor) -> None:
        for layer in range(self.spec.num_layers):
            plan = reservation[self.manager.group_of(layer)]
            self.manager.write(plan, layer, key[layer], value[layer])
