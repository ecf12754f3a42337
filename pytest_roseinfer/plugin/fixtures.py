"""Fixtures that any test may use; ``pytest --fixtures`` shows their docstrings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.plugin import markers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.gates.costs import Costs
    from pytest_roseinfer.gates.tpot import Tpot
    from roseinfer import KVBlockManager, TinyGPT2


@pytest.fixture(scope="session")
def roseinfer_device() -> str:
    """Device of the caches under test: ``"cuda"`` with --roseinfer-gpu, else ``"cpu"``.

    With several GPUs, each pytest-xdist worker gets its own: ``"cuda:1"``.
    """
    settings.choose_kernel_runtime()
    return settings.current().device


@pytest.fixture
def roseinfer_spec(roseinfer_device: str) -> CacheSpec:
    """Shape of the fixtures' caches: 2 layers, 2 heads of 8, 16 blocks of 4 tokens, float32.

    Override it in a conftest.py to change their shape.
    """
    from pytest_roseinfer.capabilities.cache_data import CacheSpec

    return CacheSpec(
        num_layers=2, num_heads=2, head_dim=8, block_size=4, num_blocks=16, device=roseinfer_device
    )


@pytest.fixture
def roseinfer_manager(roseinfer_spec: CacheSpec) -> KVBlockManager:
    """Empty ``roseinfer.KVBlockManager`` of shape ``roseinfer_spec``, with all fast paths on."""
    return _manager(roseinfer_spec)


@pytest.fixture
def roseinfer_reference(roseinfer_spec: CacheSpec) -> KVBlockManager:
    """Reference ``roseinfer.KVBlockManager`` of the same shape, which writes token by token."""
    return _manager(replace(roseinfer_spec, options={"batched": False}))


def _manager(spec: CacheSpec) -> KVBlockManager:
    from pytest_roseinfer.targets.roseinfer_kv import PerLayerManager

    cache = PerLayerManager()
    cache.make(spec)
    return cache.manager


@pytest.fixture(scope="session")
def roseinfer_tiny_gpt2(roseinfer_device: str) -> TinyGPT2:
    """Small random GPT-2 and its byte-level tokenizer: ``.model`` and ``.tokenizer``.

    It is built without network and always has the same weights, which are so large that the
    argmax is never a tie. All tests share it, so do not change it.
    """
    from roseinfer import tiny_gpt2

    return tiny_gpt2(roseinfer_device)


@pytest.fixture
def roseinfer_costs(request: pytest.FixtureRequest) -> Iterator[Costs]:
    """Gate that compares the work of a decode step with its baseline: counts, not times.

    ``roseinfer_costs.check("steady", engine.step, tokens=8)`` counts torch operations, Triton
    launches, CUDA graph replays, copies between devices, waits, allocations and Python calls, and
    fails if one exceeds the baseline. ``--roseinfer-update-costs`` writes the baseline.
    ``check_bytes`` counts the bytes that operations and kernels must move, including those of
    CUDA graphs that are captured while the test has this fixture. ``check_growth`` measures the
    bytes that Python allocates in contexts of two lengths.
    """
    settings.choose_kernel_runtime()
    from pytest_roseinfer.gates.bytes_moved import record_captures
    from pytest_roseinfer.gates.costs import Costs

    with record_captures():
        yield Costs(request.node, markers.arguments(request.node, markers.COSTS))


@pytest.fixture
def roseinfer_tpot(request: pytest.FixtureRequest) -> Tpot:
    """Gate that times a decode step against another revision, or this GPU's baseline.

    ``roseinfer_tpot.check("my_engine.speed:decode")`` names a function that returns
    ``{"step": call_me, "tokens": 8}``. With ``--roseinfer-against REF``, both sides import it
    from their own tree and are timed in turns; SLOWER fails the test. Without a timing option the
    test is skipped.
    """
    from pytest_roseinfer.gates.tpot import Tpot

    return Tpot(request, markers.arguments(request.node, markers.TPOT))
