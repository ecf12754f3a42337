"""One replica: the same application as without Ray, in a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from roseinfer.engine_process.loaded import keep_loaded
from roseinfer.errors import RoseinferError
from roseinfer.how_far import say
from roseinfer.replicas.asked import is_last
from roseinfer.server.access_log import NOTE, Note

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Message

    from roseinfer.replicas.asked import Asked
    from roseinfer.replicas.deployed import Deployed
    from roseinfer.server.service import Service


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
    from roseinfer.engine_process.this_process import InProcess
    from roseinfer.llm import LLM
    from roseinfer.server.service import Service

    llm = LLM(
        deployed.model, device=deployed.device, dtype=deployed.dtype, **deployed.engine_config
    )
    # The line of a request is written by the process that listens.
    config = replace(deployed.config, access_log=False)
    return Service(InProcess(llm), deployed.names, config, deployed.chat_template, number)
