"""How prompts are read: in which thread, one after the other or not, and until when."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, current_thread
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.errors import EngineStopped
from roseinfer.server import prompts as reading
from roseinfer.server.prompts import Prompt, PromptEncoder
from tests.server.served import MODEL, PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.served import Server

HUGE = "x" * (reading._MAX_SHARED_SIZE + 1)
LONG = "y" * (reading._MAX_INLINE_SIZE + 1)


@dataclass
class Held:
    """A tokenizer that reads a huge prompt until it may go on."""

    is_fast: bool
    read: list[int] = field(default_factory=list)
    """Characters of each text, in the order in which they were begun."""
    together: int = 0
    """The most texts that were read at the same time."""
    held: Event = field(default_factory=Event)
    may_go_on: Event = field(default_factory=Event)
    _now: int = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        if text:
            self.read.append(len(text))
        self._now += 1
        self.together = max(self.together, self._now)
        if len(text) >= len(HUGE):
            self.held.set()
            assert self.may_go_on.wait(PATIENCE)
        self._now -= 1
        return [5]

    def decode(self, token_ids: list[int]) -> str:
        self.encode("z" * len(token_ids))
        return "text"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]

    async def holds(self) -> None:
        assert await asyncio.to_thread(self.held.wait, PATIENCE)


@contextmanager
def reads_with(tokenizer: Held, server: Server) -> Iterator[PromptEncoder]:
    info = replace(server.service.engine_client.info, tokenizer=tokenizer)
    prompts = PromptEncoder(info, None, "{{ messages[0].content }}")
    try:
        yield prompts
    finally:
        tokenizer.may_go_on.set()
        prompts.close()


def test_short_prompts_are_read_at_once_and_long_ones_in_threads(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    real = PromptEncoder._read

    def read(prompts: PromptEncoder, prompt: str | list[int], field: str) -> Prompt:
        threads.append(current_thread().name)
        return real(prompts, prompt, field)

    monkeypatch.setattr(PromptEncoder, "_read", read)
    bodies: list[Any] = ["x" * 600, [[5] * 400, [6] * 600], ["x" * 600] * 2, [5] * 1001, HUGE]
    for prompt in bodies:
        server.post("completions", prompt=prompt, max_tokens=1)
    assert threads[3:] == ["roseinfer-prompts"] * 3 + ["roseinfer-huge-prompts"]
    assert not {*threads[:3]} & {*threads[3:]}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "in Python"])
@pytest.mark.parametrize("kind", ["text", "chat", "tokens"])
def test_a_huge_prompt_holds_up_no_others_but_those_of_a_tokenizer_in_python(
    server: Server, kind: str, fast: bool
) -> None:
    """Which may do one thing at a time."""
    tokenizer = Held(fast)

    async def ask(prompts: PromptEncoder) -> None:
        def read(text: str) -> asyncio.Future[Any]:
            if kind == "text":
                return asyncio.ensure_future(prompts.encode([text], "prompt"))
            if kind == "tokens":
                return asyncio.ensure_future(prompts.decode([[5] * len(text)]))
            messages = [{"role": "user", "content": text}]
            return asyncio.ensure_future(prompts.encode_chat(messages, "messages"))

        huge = read(HUGE)
        await tokenizer.holds()
        others = [asyncio.ensure_future(prompts.encode(["x"], "prompt")), read(LONG)]
        if fast:
            await asyncio.wait_for(asyncio.gather(*others), PATIENCE)
        else:
            for _ in range(100):
                await asyncio.sleep(0)
            assert not any(each.done() for each in others)
        assert not huge.done()
        tokenizer.may_go_on.set()
        await asyncio.gather(huge, *others)

    with reads_with(tokenizer, server) as prompts:
        asyncio.run(ask(prompts))
    assert sorted(tokenizer.read) == [1, len(LONG), len(HUGE)]
    assert tokenizer.together == (2 if fast else 1)


def test_prompts_of_a_client_that_left_are_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the one that is being read is read to its end, since nothing can interrupt that."""
    tokenizer = Held(is_fast=True)
    monkeypatch.setattr(server.service.prompts._tokenizer, "encode", tokenizer.encode)
    body = {"model": MODEL, "prompt": [HUGE, HUGE + "2", HUGE + "33"], "max_tokens": 1}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as asking:
        asking.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        assert tokenizer.held.wait(PATIENCE)
        assert server.post("completions", prompt="x", max_tokens=1).status == 200
        assert server.service.admission.num_open == 3
    end = time.monotonic() + PATIENCE
    while server.service.admission.num_open:
        assert time.monotonic() < end, "the hang-up is not seen while a prompt is read"
        time.sleep(0.002)
    assert json.loads(server.lines[-1])["client_disconnected"]
    tokenizer.may_go_on.set()
    assert server.post("completions", prompt=HUGE + "444", max_tokens=1).status == 200
    assert tokenizer.read == [len(HUGE), 1, len(HUGE) + 3]


def test_prompts_that_are_not_read_when_the_time_is_up_fail(server: Server) -> None:
    tokenizer = Held(is_fast=True)

    async def ask(prompts: PromptEncoder) -> None:
        huge = [asyncio.ensure_future(prompts.encode([HUGE], "prompt")) for _ in range(2)]
        await tokenizer.holds()
        await asyncio.to_thread(prompts.abort)
        for found in await asyncio.wait_for(
            asyncio.gather(*huge, prompts.encode([LONG], "prompt"), return_exceptions=True),
            PATIENCE,
        ):
            assert isinstance(found, EngineStopped), found

    before = {*threading.enumerate()}  # servers have such threads too
    with reads_with(tokenizer, server) as prompts:
        asyncio.run(ask(prompts))
    assert tokenizer.read == [len(HUGE)]
    began = {each.name for each in {*threading.enumerate()} - before}
    assert not began & {"roseinfer-prompts", "roseinfer-huge-prompts"}
