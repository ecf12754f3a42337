"""Adapter of vLLM's block manager (V1), driven as by its scheduler.

A waiting request is looked up and gets blocks for the rest; a running one gets its new token before
its room is allocated.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheFull,
    CacheSpec,
    Ledger,
)
from pytest_roseinfer.capabilities.text_keys import KeyPart
from pytest_roseinfer.targets.block_manager import BlockManagerAdapter
from pytest_roseinfer.targets.partial_import import import_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import Event
    from pytest_roseinfer.oracle.texts import TextKey

_INSTALL = "run python -m tests.others.fetch vllm in a clone of roseinfer, or install vllm"
_ENDLESS = 1 << 20


def vllm_part(name: str) -> Any:
    return import_part("vllm", name, _INSTALL)


class BlocksInUse(Exception):
    """Refusal of a reset while requests hold blocks."""


class VllmAdapter(BlockManagerAdapter):
    """Adapter with full attention in all layers."""

    reset_errors: ClassVar[tuple[type[BaseException], ...]] = (BlocksInUse,)

    prefixes = BlockManagerAdapter.prefixes.but(evicts="least recent")
    spare_blocks: ClassVar[int] = 1  # block 0 replaces blocks that were given back
    use_namespaces = BlockManagerAdapter.record_namespaces

    def manage(self, spec: CacheSpec) -> None:
        utils, sha256 = vllm_part("v1.core.kv_cache_utils"), vllm_part("utils.hashing").sha256
        utils.init_none_hash(sha256)
        self.hasher = utils.get_request_block_hasher(spec.block_size, sha256)
        self.sampling = vllm_part("sampling_params").SamplingParams(max_tokens=_ENDLESS)
        self.kinds = list(dict.fromkeys(self.window_of))
        group = vllm_part("v1.kv_cache_interface").KVCacheGroupSpec
        groups = [group([], _layers(spec, window)) for window in self.kinds]
        config = vllm_part("v1.kv_cache_interface").KVCacheConfig(spec.num_blocks + 1, [], groups)
        self.manager = vllm_part("v1.core.kv_cache_manager").KVCacheManager(
            self.configure(config, spec),
            max_model_len=_ENDLESS,
            scheduler_block_size=spec.block_size,
            hash_block_size=spec.block_size,
            enable_kv_cache_events="events" in self.abilities,
            use_eagle=spec.options.get("eagle", False),
        )
        self.requests: dict[int, Any] = {}
        self.numbers = itertools.count()

    def configure(self, config: Any, spec: CacheSpec) -> Any:  # noqa: ARG002
        return config

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:
        resumed = seq in self.preempted
        request = self.requests[seq] if resumed else self._request(token_ids, namespace)
        cached, count, *_ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, len(token_ids) - count, count, cached) is None:
            raise CacheFull
        request.num_computed_tokens = count
        self.requests[seq] = request
        return int(count)

    def _request(self, token_ids: Sequence[int], namespace: Any) -> Any:
        name, params = str(next(self.numbers)), (self.sampling, None)  # None: no pooling
        key = self.key_arguments(namespace)
        return vllm_part("v1.request").Request(
            name, list(token_ids), *params, **key, block_hasher=self.hasher
        )

    def key_arguments(self, namespace: Any) -> dict[str, Any]:
        """Return the arguments of a request that are part of its keys."""
        return {"cache_salt": str(namespace)}

    def extend(self, seq: int, token: int) -> None:
        request = self.requests[seq]
        hashes = len(request.block_hashes)
        request.append_output_token_ids(token)
        if self.manager.allocate_slots(request, 1) is None:
            # Its scheduler would retry in the next step; here the token is passed again then.
            del request._output_token_ids[-1], request._all_token_ids[-1]
            del request.block_hashes[hashes:]
            raise CacheFull

    def refuse_without_room(self, seqs: Sequence[int]) -> None:
        """Raise an error unless a batch has room: blocks of transfers in flight are not free."""
        lengths = [len(self.stored_tokens[seq][0]) for seq in seqs if seq in self.stored_tokens]
        full = sum(length % self.spec.block_size == 0 for length in lengths)
        needed = len(seqs) - len(lengths) + full
        if needed > self.manager.block_pool.get_num_free_blocks():
            raise CacheFull

    def stored(self, seq: int, tokens: int) -> None:
        self.requests[seq].num_computed_tokens += tokens

    def release(self, seq: int) -> None:
        self.manager.free(self.requests[seq])
        self.requests[seq].num_computed_tokens = 0

    def reset(self) -> None:
        if not self.manager.reset_prefix_cache():
            raise BlocksInUse

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return int(self.manager.get_computed_blocks(self._request(token_ids, self.namespace(0)))[1])

    def table(self, seq: int, layer: int) -> list[int | None]:
        tables = self.manager.get_block_ids(self.requests[seq].request_id)
        return [block or None for block in tables[self.kinds.index(self.window_of[layer])]]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002  all layers share a pool
        pool = self.manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        refcounts = {each.block_id: each.ref_cnt for each in pool.blocks[1:] if each.ref_cnt}
        cached = {block for block in free if pool.blocks[block].block_hash is not None}
        total, num_free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        return Ledger(refcounts, free, total, cached, num_free=num_free)


def _layers(spec: CacheSpec, window: int | None) -> Any:
    interface = vllm_part("v1.kv_cache_interface")
    shape = spec.block_size, spec.num_heads, spec.head_dim, getattr(torch, spec.dtype)
    names = dict(zip(("block_size", "num_kv_heads", "head_size", "dtype"), shape, strict=True))
    if window is None:
        return interface.FullAttentionSpec(**names)
    return interface.SlidingWindowSpec(**names, sliding_window=window)


class EventsVllmAdapter(VllmAdapter):
    """Adapter that also reads vLLM's events of stored and removed blocks."""

    def manage(self, spec: CacheSpec) -> None:
        super().manage(spec)
        self.namespace_of: dict[Any, int] = {}
        """Namespace of each block by its hash, as the events show it."""

    def events(self) -> list[Event]:
        return [self._translated(each) for each in self.manager.take_events()]

    def _translated(self, event: Any) -> Event:
        """Return an event of vLLM, which names the salt at the first block of a text only."""
        kinds = vllm_part("distributed.kv_events")
        if isinstance(event, kinds.AllBlocksCleared):
            return AllBlocksCleared()
        if isinstance(event, kinds.BlockRemoved):
            return BlockRemoved(event.block_hashes)
        parent = event.parent_block_hash
        if parent is None:
            ((salt,), *_) = event.extra_keys
            namespace = int(salt)
        else:
            namespace = self.namespace_of[parent]
        self.namespace_of |= dict.fromkeys(event.block_hashes, namespace)
        return BlockStored(event.block_hashes, parent, event.token_ids, namespace)


class KeyedVllmAdapter(VllmAdapter):
    """Adapter of requests with LoRA adapters, salts and images."""

    key_parts = (
        KeyPart("adapter"),
        KeyPart("path", of="adapter"),
        KeyPart("salt", values=(None, "a", "b", "ab", "adapter")),  # vLLM refuses an empty one
        KeyPart("image", spans=True),
    )
    use_namespaces = KVCacheAdapter.use_namespaces  # not offered: salts are parts of keys

    def use_text_keys(self, keys: Sequence[TextKey]) -> None:
        self.row_keys = keys

    def namespace(self, row: int) -> Any:
        return self.row_keys[row]

    def key_arguments(self, namespace: TextKey) -> dict[str, Any]:
        parts, lora = namespace.parts, None
        if (name := parts["adapter"]) is not None:
            path = f"path {parts['path']!r}"
            lora = vllm_part("lora.request").LoRARequest(name, 1, path)
        images = self._images(namespace)
        return {"cache_salt": parts["salt"], "lora_request": lora, "mm_features": images}

    def _images(self, key: TextKey) -> list[Any]:
        inputs = vllm_part("multimodal.inputs")
        return [
            inputs.MultiModalFeatureSpec(
                None,
                "image",
                image.value,
                inputs.PlaceholderRange(image.begin, image.end - image.begin),
            )
            for image in key.spans
        ]

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for row, seq in enumerate(seqs):
            if seq in self.stored_tokens:
                self.requests[seq].mm_features = self._images(self.row_keys[row])
        super().append(seqs, key, value)


# Windows: the layers of each window are a group.


class WindowsVllmAdapter(VllmAdapter):
    """Adapter with windows, which may retain only some blocks for reuse; EAGLE finds fewer."""

    prefixes = VllmAdapter.prefixes.but(evicts="any", finds="some")
    windows = VllmAdapter.windows.but(groups=3, pools="shared", frees="next try")
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "blocks between kept ones": (None, 0, 1, 2, 3),
        "eagle": (False, True),
    }

    def configure(self, config: Any, spec: CacheSpec) -> Any:
        blocks = spec.options["blocks between kept ones"]
        if blocks is None or not any(self.window_of):
            return config
        return replace(config, prefix_cache_retention_interval=blocks * spec.block_size)
