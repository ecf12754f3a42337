"""What is used of SGLang, imported where there is neither a GPU nor its kernels."""

from __future__ import annotations

from types import SimpleNamespace

from transformers.utils import is_torchvision_available

from pytest_roseinfer.targets.others.without_its_top import part_of, without

_INSTALL = "unpack its wheel, and those it imports, into a folder of PYTHONPATH"
_USED = {
    "managers.schedule_batch": ("FINISH_LENGTH", "Req", "SamplingParams", "release_req"),
    "mem_cache.allocation": ("alloc_for_decode", "alloc_for_extend"),
    "mem_cache.allocator": ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"),
    "mem_cache.allocator.swa": ("SWATokenToKVPoolAllocator",),
    "mem_cache.base_prefix_cache": ("EvictParams", "MatchPrefixParams"),
    "mem_cache.base_swa_memory_pool": ("BaseSWAKVPool",),
    "mem_cache.cache_init_params": ("CacheInitParams",),
    "mem_cache.common": ("checkpoint_kv_cache", "evict_from_tree_cache", "release_kv_cache"),
    "mem_cache.memory_pool": ("ReqToTokenPool",),
    "mem_cache.unified_radix_cache": ("ComponentType", "RadixKey", "UnifiedRadixCache"),
    "runtime_context": ("get_context",),
}


def sglang() -> SimpleNamespace:
    """Import it, and publish a configuration, which each of its processes does."""
    is_torchvision_available()  # transformers remembers the answer
    images = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    with without(*images):
        parts = {part_of("sglang", f"srt.{name}", _INSTALL): used for name, used in _USED.items()}
    found = {name: getattr(module, name) for module, names in parts.items() for name in names}
    context = found["get_context"]()
    if context._server_args is None:  # to ask for it otherwise is an error
        context.override_server_args().install()
    return SimpleNamespace(**found)
