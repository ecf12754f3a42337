"""Reading of prompts: threads, concurrency, and cancellation."""

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
class BlockingTokenizer:
    """Tokenizer that reads a huge prompt until it is released."""

    is_fast: bool
    read: list[int] = field(default_factory=list)
    """Characters of each text, in the order in which reading began."""
    max_concurrent: int = 0
    """Maximum number of texts read at the same time."""
    blocked: Event = field(default_factory=Event)
    release: Event = field(default_factory=Event)
    _concurrent: int = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        if text:
            self.read.append(len(text))
        self._concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self._concurrent)
        if len(text) >= len(HUGE):
            self.blocked.set()
            assert self.release.wait(PATIENCE)
        self._concurrent -= 1
        return [5]

    def decode(self, token_ids: list[int]) -> str:
        self.encode("z" * len(token_ids))
        return "text"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]

    async def await_blocked(self) -> None:
        assert await asyncio.to_thread(self.blocked.wait, PATIENCE)


@contextmanager
def encoder_with(tokenizer: BlockingTokenizer, server: Server) -> Iterator[PromptEncoder]:
    info = replace(server.service.engine_client.info, tokenizer=tokenizer)
    prompts = PromptEncoder(info, None, "{{ messages[0].content }}")
    try:
        yield prompts
    finally:
        tokenizer.release.set()
        prompts.close()


def test_short_prompts_are_read_inline_and_long_ones_in_threads(
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
def test_huge_prompt_blocks_others_only_with_a_python_tokenizer(
    server: Server, kind: str, fast: bool
) -> None:
    """A tokenizer in Python may run in one thread at a time."""
    tokenizer = BlockingTokenizer(fast)

    async def run_prompts(prompts: PromptEncoder) -> None:
        def read(text: str) -> asyncio.Future[Any]:
            if kind == "text":
                return asyncio.ensure_future(prompts.encode([text], "prompt"))
            if kind == "tokens":
                return asyncio.ensure_future(prompts.decode([[5] * len(text)]))
            messages = [{"role": "user", "content": text}]
            return asyncio.ensure_future(prompts.encode_chat(messages, "messages"))

        huge = read(HUGE)
        await tokenizer.await_blocked()
        others = [asyncio.ensure_future(prompts.encode(["x"], "prompt")), read(LONG)]
        if fast:
            await asyncio.wait_for(asyncio.gather(*others), PATIENCE)
        else:
            for _ in range(100):
                await asyncio.sleep(0)
            assert not any(each.done() for each in others)
        assert not huge.done()
        tokenizer.release.set()
        await asyncio.gather(huge, *others)

    with encoder_with(tokenizer, server) as prompts:
        asyncio.run(run_prompts(prompts))
    assert sorted(tokenizer.read) == [1, len(LONG), len(HUGE)]
    assert tokenizer.max_concurrent == (2 if fast else 1)


def test_prompts_of_a_disconnected_client_are_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt being read is read to its end, since nothing can interrupt that."""
    tokenizer = BlockingTokenizer(is_fast=True)
    monkeypatch.setattr(server.service.prompts._tokenizer, "encode", tokenizer.encode)
    body = {"model": MODEL, "prompt": [HUGE, HUGE + "2", HUGE + "33"], "max_tokens": 1}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        assert tokenizer.blocked.wait(PATIENCE)
        assert server.post("completions", prompt="x", max_tokens=1).status == 200
        assert server.service.admission.num_open == 3
    end = time.monotonic() + PATIENCE
    while server.service.admission.num_open:
        assert time.monotonic() < end, "the disconnect is not noticed while a prompt is read"
        time.sleep(0.002)
    assert json.loads(server.lines[-1])["client_disconnected"]
    tokenizer.release.set()
    assert server.post("completions", prompt=HUGE + "444", max_tokens=1).status == 200
    assert tokenizer.read == [len(HUGE), 1, len(HUGE) + 3]


def test_unread_prompts_fail_when_aborted(server: Server) -> None:
    tokenizer = BlockingTokenizer(is_fast=True)

    async def run_prompts(prompts: PromptEncoder) -> None:
        huge = [asyncio.ensure_future(prompts.encode([HUGE], "prompt")) for _ in range(2)]
        await tokenizer.await_blocked()
        await asyncio.to_thread(prompts.abort)
        for result in await asyncio.wait_for(
            asyncio.gather(*huge, prompts.encode([LONG], "prompt"), return_exceptions=True),
            PATIENCE,
        ):
            assert isinstance(result, EngineStopped), result

    before = {*threading.enumerate()}  # servers have such threads, too
    with encoder_with(tokenizer, server) as prompts:
        asyncio.run(run_prompts(prompts))
    assert tokenizer.read == [len(HUGE)]
    new_threads = {each.name for each in {*threading.enumerate()} - before}
    assert not new_threads & {"roseinfer-prompts", "roseinfer-huge-prompts"}
