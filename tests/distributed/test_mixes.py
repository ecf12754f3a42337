"""The harness's mixes of requests, served by two ranks."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer.targets import engine_models, roseinfer_engine
from pytest_roseinfer.targets import engine_models as shapes
from roseinfer.distributed.follower import Follower
from tests.distributed.followers import in_threads
from tests.engine.searched_mixes import search
from tests.sampled import every_test

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MIXES = 40 if every_test() else 10
_SHARED = ("gpt2", "llama", "llama 10:2", *shapes.WITH_WINDOWS_ALONE, shapes.SOFTCAP)


class SharedEngine(roseinfer_engine.RoseinferEngine):
    """Our engine on two ranks, with models that can be shared."""

    paths: ClassVar[Mapping[str, Any]] = {}  # these would aim at models that are not shared
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
    """Rank 1 is a thread, whose cache begins full of NaN, and each rank cuts a model of its own."""
    whole = lru_cache(engine_models.network)
    begin = Follower.__init__

    def begin_with_nan(follower: Follower, *args: Any) -> None:
        begin(follower, *args)
        for cache in (follower._kv.keys, follower._kv.values):
            cache.fill_(float("nan"))

    in_threads(monkeypatch)
    monkeypatch.setattr(Follower, "__init__", begin_with_nan)
    monkeypatch.setattr(roseinfer_engine, "_served", lambda *of: deepcopy(whole(*of)))


def test_every_request_gets_what_it_gets_alone() -> None:
    search(SharedEngine, MIXES)
