"""Random mixes of the harness on two ranks."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer.targets import engine_models, roseinfer_engine
from pytest_roseinfer.targets import engine_models as shapes
from roseinfer.distributed.follower import Follower
from tests.distributed.followers import run_ranks_in_threads
from tests.engine.searched_mixes import search

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

pytestmark = pytest.mark.slow


_SHARED = ("gpt2", "llama", "llama 10:2", *shapes.WITH_WINDOWS_ALONE, shapes.SOFTCAP)


class SharedEngine(roseinfer_engine.RoseinferEngine):
    """The engine on two ranks, with models that can be sharded."""

    paths: ClassVar[Mapping[str, Any]] = {}  # these would require models that cannot be sharded
    long_contexts: ClassVar[Mapping[str, int]] = {}
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **roseinfer_engine.RoseinferEngine.option_choices,
        "model": _SHARED,
        "per_layer_kv": (False,),
        "tensor_parallel_size": (2,),
    }

    def path_counts(self) -> Mapping[str, int]:
        return {}


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run rank 1 as a thread, with a cache full of NaN, and shard a new model for each rank."""
    whole = lru_cache(engine_models.network)
    begin = Follower.__init__

    def begin_with_nan(follower: Follower, *args: Any) -> None:
        begin(follower, *args)
        for cache in (follower._kv.keys, follower._kv.values):
            cache.fill_(float("nan"))

    run_ranks_in_threads(monkeypatch)
    monkeypatch.setattr(Follower, "__init__", begin_with_nan)
    monkeypatch.setattr(roseinfer_engine, "_cached_network", lambda *of: deepcopy(whole(*of)))


@pytest.mark.parametrize("mixes", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_requests_of_mixes_match_each_alone(mixes: int) -> None:
    search(SharedEngine, mixes)
