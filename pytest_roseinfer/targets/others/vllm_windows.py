"""vLLM's block manager for layers with windows, those of each window being a group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.targets.others.vllm_kv import VllmAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.cache import CacheSpec


class WindowsVllmAdapter(VllmAdapter):
    """What a window keeps for later prompts may be thinned out; with EAGLE, less is found."""

    evicts: ClassVar[str] = "any"
    match_finds: ClassVar[str] = "some"
    window_groups: ClassVar[int] = 3
    window_pools: ClassVar[str] = "shared"
    window_gives_back: ClassVar[str] = "next try"
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "blocks between kept ones": (None, 0, 1, 2, 3),
        "eagle": (False, True),
    }

    def configured(self, config: Any, spec: CacheSpec) -> Any:
        blocks = spec.options["blocks between kept ones"]
        if blocks is None or not any(self.windows):
            return config
        return replace(config, prefix_cache_retention_interval=blocks * spec.block_size)
