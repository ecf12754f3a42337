"""Deployment of replicas as Ray processes: start, calls and shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import LoggingConfig

from roseinfer.config import set_default_environment
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.garbage import freeze_gc
from roseinfer.replicas.front import ReplicaLost, is_last
from roseinfer.server.access_log import REQUEST_LOG_KEY, RequestLogEntry
from roseinfer.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.types import Message

    from roseinfer.replicas.front import ForwardedRequest
    from roseinfer.replicas.spec import ReplicaSpec
    from roseinfer.server.service import Service

# One replica: the server's application in a process of its own.


class Replica:
    """Replica, which Ray creates and calls in a process of its own."""

    def __init__(self, spec: ReplicaSpec) -> None:
        from ray import serve

        self._problem: str | None = None
        self._ending = False
        number = serve.get_replica_context().rank.rank
        print_status(f"replica {number}: loading {spec.model}")
        try:
            self._service = _service(spec, number)
        except RoseinferError as error:  # raising it would make Ray retry, with long log messages
            self._problem = str(error)
            return
        from roseinfer.server.app import build_app

        self._app = build_app(self._service)
        freeze_gc()

    async def answer(
        self, request: ForwardedRequest
    ) -> AsyncGenerator[list[Message] | RequestLogEntry, None]:
        """Yield the application's messages, as many at a time as available.

        The log entry is yielded before the last messages: after them, the client may disconnect.
        """
        disconnected = asyncio.Event()
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        first: list[Message] = [
            {"type": "http.request", "body": request.body, "more_body": False},
        ]

        async def receive() -> Message:
            if first:
                return first.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        log_entry = RequestLogEntry(request.id)
        answering = asyncio.ensure_future(
            self._app(request.scope | {REQUEST_LOG_KEY: log_entry}, receive, queue.put)
        )
        answering.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while True:
                messages = [await queue.get()]
                while not queue.empty():
                    messages.append(queue.get_nowait())
                sent = [message for message in messages if message is not None]
                if len(sent) < len(messages) or is_last(sent):
                    await answering
                    yield log_entry
                    yield sent
                    return
                yield sent
        finally:
            disconnected.set()  # cancels the completions that have not ended
            await answering

    def load_error(self) -> str | None:
        """Return the error that prevented loading the model; None if it is loaded."""
        return self._problem

    def metrics(self) -> bytes:
        return self._service.metrics_page.text()

    def ready(self) -> bool:
        return self._service.ready

    def can_chat(self) -> bool:
        return self._service.prompts.can_chat

    def abort(self) -> None:
        """Fail the open completions."""
        self._ending = True
        self._service.abort()

    def check_health(self) -> None:
        """Raise if the engine has stopped; Ray then replaces this replica."""
        if self._problem is None and not (self._ending or self._service.alive):
            raise RuntimeError("the engine has stopped")


def _service(spec: ReplicaSpec, number: int) -> Service:
    # Imported here: the process that starts replicas does not need torch.
    from roseinfer.engine_client.in_process import InProcessClient
    from roseinfer.llm import LLM
    from roseinfer.server.service import Service

    llm = LLM(spec.model, device=spec.device, dtype=spec.dtype, **spec.engine_config)
    # The front process writes the access log.
    config = replace(spec.config, access_log=False)
    return Service(InProcessClient(llm), spec.names, config, spec.chat_template, number)


_NAME = "roseinfer"
_NO_LIMIT = 1 << 30
"""Requests that Ray sends to a replica at a time: unlimited, as replicas have their own limits."""
_STORE_BYTES = 100 << 20
"""Bytes of Ray's object store: messages are small, and hardly any is stored."""
_LOST_ERRORS = (RayActorError, DeploymentUnavailableError)
_CALL_TIMEOUT_S = 5
"""Seconds that a replica may take to answer a call about its state."""


class Deployment:
    """Running replicas, called through Ray's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(
        self, request: ForwardedRequest
    ) -> AsyncGenerator[list[Message] | RequestLogEntry, None]:
        """Forward a request to a replica; raise ``ReplicaLost`` if it ends before its response."""
        parts = self._handle.options(stream=True).answer.remote(request)
        ended = False
        try:
            async for part in parts:
                yield part
            ended = True
        except _LOST_ERRORS:
            ended = True
            raise ReplicaLost from None
        finally:
            if not ended:
                parts.cancel()

    async def metrics(self) -> list[bytes]:
        return await self._all("metrics")

    async def ready(self) -> bool:
        return any(await self._all("ready"))

    def can_chat(self) -> bool:
        result: bool = self._handle.can_chat.remote().result()
        return result

    def abort(self) -> None:
        self._handle.broadcast("abort").results(timeout_s=_CALL_TIMEOUT_S)

    async def _all(self, method: str) -> list[Any]:
        """Call a method of all replicas, and return their results; empty if one was lost."""
        try:
            results: list[Any] = await self._handle.broadcast(method).results_async(
                timeout_s=_CALL_TIMEOUT_S
            )
        except _LOST_ERRORS:
            return []
        return results


@contextmanager
def run_replicas(spec: ReplicaSpec) -> Iterator[Deployment]:
    """Start Ray and the replicas on this machine; shut them down after the block."""
    count = spec.config.replicas or 1
    cores = os.cpu_count() or 1
    set_default_environment(
        {
            "RAY_USAGE_STATS_ENABLED": "0",  # Ray sends no usage statistics
            "OMP_NUM_THREADS": str(max(1, cores // count)),  # Ray's default is 1
        }
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        "local",
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        logging_level=logging.ERROR,
    )
    try:
        handle = _deploy(spec, count)
        for load_error in handle.broadcast("load_error").results():
            if load_error is not None:
                raise ConfigError(load_error)
        yield Deployment(handle)
    finally:
        serve.shutdown()
        ray.shutdown()


def _deploy(spec: ReplicaSpec, count: int) -> Any:
    gpus = spec.gpus_per_replica(int(ray.cluster_resources().get("GPU", 0)))
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(proxy_location="Disabled", logging_config=quiet)
    deployment = serve.deployment(Replica).options(
        num_replicas=count,
        # No CPU per replica, so that there can be more replicas than CPU cores.
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
        max_ongoing_requests=_NO_LIMIT,
        max_constructor_retry_count=1,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=2,
        health_check_period_s=2,
    )
    try:
        return serve.run(deployment.bind(spec), name=_NAME, route_prefix=None, logging_config=quiet)
    except RuntimeError as error:
        raise ConfigError(f"--replicas {count}: cannot start the replicas: {error}") from None
