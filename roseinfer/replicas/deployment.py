"""Replicas as processes of Ray's: started, called and ended."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import LoggingConfig

from roseinfer.config import prefer_variables
from roseinfer.engine_client.protocol import keep_loaded
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.progress import say
from roseinfer.replicas.front import ReplicaLost, is_last
from roseinfer.server.access_log import NOTE, Note

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.types import Message

    from roseinfer.config import ServerConfig
    from roseinfer.replicas.front import Asked
    from roseinfer.server.service import Service

# What every replica is made of, as plain values that go from process to process.


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model, how it is run, and how it is served."""

    model: str
    device: str | None
    dtype: str | None
    engine_config: dict[str, Any]
    config: ServerConfig
    chat_template: str | None

    def __post_init__(self) -> None:
        if self.device is not None and ":" in self.device:
            raise ConfigError(
                f"--device {self.device} names one GPU, and each replica gets one of its own: "
                "--device cuda"
            )

        if self.engine_config.get("tensor_parallel_size", 1) != 1:
            raise ConfigError(
                "--replicas and --tensor-parallel-size do not go together: a replica has one GPU"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.served_model_name or (self.model,)

    def gpus_wanted(self, there: int) -> int:
        """Return how many GPUs each replica asks for, of which so many are there for all."""
        if self.device == "cpu" or (self.device is None and not there):
            return 0
        wanted = self.config.replicas or 1
        if there < wanted:
            raise ConfigError(
                f"--replicas {wanted} needs a GPU for each, and {there} are there: fewer replicas, "
                "or --device cpu"
            )
        return 1


# One replica: the same application as without Ray, in a process of its own.


class Replica:
    """Ray makes one in each process, and calls its methods there."""

    def __init__(self, deployed: Deployed) -> None:
        from ray import serve

        self._problem: str | None = None
        self._ending = False
        number = serve.get_replica_context().rank.rank
        say(f"replica {number}: loading {deployed.model}")
        try:
            self._service = _service(deployed, number)
        except RoseinferError as error:  # Ray would try again, and say so at length
            self._problem = str(error)
            return
        from roseinfer.server.app import application

        self._app = application(self._service)
        keep_loaded()

    async def answer(self, asked: Asked) -> AsyncGenerator[list[Message] | Note, None]:
        """Yield what the application sends, as much at a time as there is.

        Its note comes before the last of it: a client that has all may leave at once.
        """
        left = asyncio.Event()
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        first: list[Message] = [
            {"type": "http.request", "body": asked.body, "more_body": False},
        ]

        async def receive() -> Message:
            if first:
                return first.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        note = Note(asked.id)
        answering = asyncio.ensure_future(self._app(asked.scope | {NOTE: note}, receive, sent.put))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while True:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                found = [message for message in messages if message is not None]
                if len(found) < len(messages) or is_last(found):
                    await answering
                    yield note
                    yield found
                    return
                yield found
        finally:
            left.set()  # which cancels the texts, if it has not ended
            await answering

    def what_is_wrong(self) -> str | None:
        """Return why nothing can be served here, if nothing can."""
        return self._problem

    def metrics(self) -> bytes:
        return self._service.metrics_page.text()

    def ready(self) -> bool:
        return self._service.ready

    def can_chat(self) -> bool:
        return self._service.prompts.can_chat

    def cut(self) -> None:
        """End the texts that are left with an error."""
        self._ending = True
        self._service.cut()

    def check_health(self) -> None:
        """Raise where the engine has stopped. Ray then puts another replica in this one's place."""
        if self._problem is None and not (self._ending or self._service.alive):
            raise RuntimeError("the engine has stopped")


def _service(deployed: Deployed, number: int) -> Service:
    # Here, since the process that starts replicas has no use for torch.
    from roseinfer.engine_client.in_process import InProcess
    from roseinfer.llm import LLM
    from roseinfer.server.service import Service

    llm = LLM(
        deployed.model, device=deployed.device, dtype=deployed.dtype, **deployed.engine_config
    )
    # The line of a request is written by the process that listens.
    config = replace(deployed.config, access_log=False)
    return Service(InProcess(llm), deployed.names, config, deployed.chat_template, number)


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
