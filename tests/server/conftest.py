"""Server shared by the tests of this folder; nothing may be held after a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roseinfer import LLM
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.served import Server


@pytest.fixture(scope="session")
def _shared_server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def server(_shared_server: Server) -> Iterator[Server]:
    yield _shared_server
    _shared_server.await_idleness()


@pytest.fixture(scope="session")
def alone() -> LLM:
    """Return an engine that generates the expected completions without a server."""
    return LLM("tiny", device="cpu", dtype="float32", kv_cache_tokens=8192, prefix_cache=False)
