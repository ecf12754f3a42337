"""A cache with sequences of all kinds, and calls that it must reject without side effects."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import AppendPolicy, KVBlockManager, RoseinferError
from tests.kv.twins import BLOCK_SIZE, Snapshot, build

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Call = tuple[Any, ...]
"""A function and its arguments."""


@dataclass
class Scene:
    """Sequences of layer 0, one of layer 1, and a freed block."""

    kv: KVBlockManager
    partial: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    fork: list[int] = field(default_factory=list)
    other_layer: list[int] = field(default_factory=list)
    free_id: int = 0

    def tokens(self, *batch: int) -> torch.Tensor:
        """Return tokens of zeros, which show in a poisoned cache."""
        return self.kv.keys.new_zeros(*batch, self.kv.num_heads, self.kv.head_dim)

    @property
    def lists(self) -> list[list[int]]:
        return [self.partial, self.full, self.shared, self.fork, self.other_layer]

    @property
    def other_device(self) -> str:
        """Return a device that every machine has and the cache is not on."""
        return "cpu" if self.kv.device.type == "cuda" else "meta"

    def append(self, lists: Any, key: Any = None, value: Any = None, layer: int = 0) -> Call:
        """Return a call of ``append_token_batch``, valid except for the arguments passed."""
        key = self.tokens(len(lists)) if key is None else key
        value = self.tokens(len(lists)) if value is None else value
        return self.kv.append_token_batch, layer, lists, key, value

    def append_one(self, ids: Any, key: Any = None, value: Any = None, layer: int = 0) -> Call:
        key = self.tokens() if key is None else key
        value = self.tokens() if value is None else value
        return self.kv.append_token, layer, ids, key, value


def build_scene(device: str, policy: AppendPolicy) -> Scene:
    kv = build(device, policy)
    scene = Scene(kv)
    freed_list: list[int] = []
    lengths = [(scene.partial, 2), (scene.full, BLOCK_SIZE), (scene.shared, 3), (freed_list, 1)]
    for ids, length in lengths:
        for _ in range(length):
            kv.append_token(0, ids, scene.tokens(), scene.tokens())
    kv.append_token(1, scene.other_layer, scene.tokens(), scene.tokens())
    kv.incref_blocks(scene.shared)
    scene.fork = list(scene.shared)
    kv.free_blocks(0, freed_list)
    scene.free_id = freed_list[0]
    return scene


@dataclass(frozen=True)
class RejectedCall:
    """Call that must raise ``error`` with ``words`` and change nothing."""

    call: Callable[[Scene], Call]
    error: type[RoseinferError]
    words: str


def assert_rejected(scene: Scene, case: RejectedCall) -> RoseinferError:
    """Make the call; assert that cache, scene lists and arguments are unchanged."""
    function, *arguments = case.call(scene)
    lists = copy.deepcopy((scene.lists, block_lists(arguments)))
    before = Snapshot.of(scene.kv)
    with pytest.raises(case.error, match=case.words) as caught:
        function(*arguments)
    before.assert_unchanged(scene.kv)
    assert (scene.lists, block_lists(arguments)) == lists
    return caught.value


def block_lists(arguments: list[Any]) -> list[Any]:
    """Return the arguments of a call that contain block ids."""
    return [argument for argument in arguments if isinstance(argument, (list, tuple))]


POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "rollover_apart": AppendPolicy(batched_rollover=False),
    "copy_on_write_apart": AppendPolicy(batched_copy_on_write=False),
    "per_token": AppendPolicy(batched=False),
}
