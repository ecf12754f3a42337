"""Replicas as processes of Ray's: started, called and ended."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import LoggingConfig

from roseinfer.config import prefer_variables
from roseinfer.errors import ConfigError
from roseinfer.replicas.asked import ReplicaLost
from roseinfer.replicas.replica import Replica

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.types import Message

    from roseinfer.replicas.asked import Asked
    from roseinfer.replicas.deployed import Deployed
    from roseinfer.server.access_log import Note

_NAME = "roseinfer"
_NO_LIMIT = 1 << 30
"""Ray queues nothing: a replica knows best what it has room for."""
_STORE_BYTES = 100 << 20
"""Messages are small, and hardly any is kept in Ray's store."""
_LOST = (RayActorError, DeploymentUnavailableError)
_ASKED_S = 5
"""So long a replica may take to say something of itself."""


class Deployment:
    """The replicas that run, by what Ray calls them with."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, asked: Asked) -> AsyncGenerator[list[Message] | Note, None]:
        """Have one of them answer. This raises ``ReplicaLost`` where that one ends first."""
        parts = self._handle.options(stream=True).answer.remote(asked)
        ended = False
        try:
            async for part in parts:
                yield part
            ended = True
        except _LOST:
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
        said: bool = self._handle.can_chat.remote().result()
        return said

    def cut(self) -> None:
        self._handle.broadcast("cut").results(timeout_s=_ASKED_S)

    async def _all(self, method: str) -> list[Any]:
        """Return what all say that are there."""
        try:
            found: list[Any] = await self._handle.broadcast(method).results_async(
                timeout_s=_ASKED_S
            )
        except _LOST:
            return []
        return found


@contextmanager
def running(deployed: Deployed) -> Iterator[Deployment]:
    """Start Ray on this machine and replicas in it, and end them all with the block."""
    count = deployed.config.replicas or 1
    cores = os.cpu_count() or 1
    prefer_variables(
        {
            "RAY_USAGE_STATS_ENABLED": "0",  # Ray tells nobody what runs here
            "OMP_NUM_THREADS": str(max(1, cores // count)),  # else Ray leaves each one thread
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
        handle = _deploy(deployed, count)
        for wrong in handle.broadcast("what_is_wrong").results():
            if wrong is not None:
                raise ConfigError(wrong)
        yield Deployment(handle)
    finally:
        serve.shutdown()
        ray.shutdown()


def _deploy(deployed: Deployed, count: int) -> Any:
    gpus = deployed.gpus_wanted(int(ray.cluster_resources().get("GPU", 0)))
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(proxy_location="Disabled", logging_config=quiet)
    deployment = serve.deployment(Replica).options(
        num_replicas=count,
        # No share of the cores, so that there may be more replicas than those.
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
        max_ongoing_requests=_NO_LIMIT,
        max_constructor_retry_count=1,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=2,
        health_check_period_s=2,
    )
    try:
        return serve.run(
            deployment.bind(deployed), name=_NAME, route_prefix=None, logging_config=quiet
        )
    except RuntimeError as error:
        raise ConfigError(f"no replica could be started: {error}") from None
