"""Engine processes, which tests share since each takes seconds to start."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from roseinfer.cli.model_options import Parser
from roseinfer.engine_client.subprocess_client import run_engine_process
from roseinfer.server import serve
from tests.server.serve_process import Serving, serving
from tests.server.served import PATIENCE
from tests.server.served import running as running_server

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from roseinfer.engine_client.subprocess_client import SubprocessClient
    from tests.server.served import Server

Result = TypeVar("Result")
ENGINE = ("--kv-cache-tokens", "8192", "--block-size", "16")


@dataclass(slots=True)
class EngineDriver:
    """An engine in another process, and the event loop that it serves."""

    engine: SubprocessClient
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        limited = asyncio.wait_for(work, PATIENCE)
        return asyncio.run_coroutine_threadsafe(limited, self.loop).result()


@pytest.fixture(scope="session")
def engine_driver() -> Iterator[EngineDriver]:
    parser = Parser()
    serve.add_options(parser)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with run_engine_process(parser.parse_args(["--device", "cpu", *ENGINE]), "test") as engine:
            resource = EngineDriver(engine, loop)
            resource.run(engine.open())
            yield resource
            engine.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def subprocess_server() -> Iterator[Serving]:
    """The serve command, with its engine in another process."""
    with serving(*ENGINE) as resource:
        yield resource


@pytest.fixture(scope="session")
def in_process_server() -> Iterator[Server]:
    """The same engine in the process of the tests."""
    with running_server() as resource:
        yield resource
