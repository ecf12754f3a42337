"""An engine's process that ends is replaced, and one that hangs is noticed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openai
import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.engine.request import BlockRequirements, RequestLimits
from roseinfer.engine_client import subprocess_client
from roseinfer.engine_client.protocol import EngineInfo, OutputDelta
from roseinfer.engine_client.subprocess_client import (
    AddRequest,
    EngineProcess,
    EngineReport,
    Heartbeat,
    RestartLimit,
    SubprocessClient,
    frame_message,
    receive_message,
)
from roseinfer.engine_thread import EngineThread, Listener
from roseinfer.errors import EngineRestarting, EngineStopped, StepFailed
from tests.engine_client.test_serve_subprocess import GREEDY, SOON, ask, child_of, figure, runs
from tests.engine_client.test_subprocess_client import LONG, PROMPT
from tests.server.serve_process import PATIENCE, serving
from tests.server.test_shutdown import LONG as LONG_BODY
from tests.server.test_shutdown import await_status, client_of, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from roseinfer.engine_client.protocol import RequestGroup
    from tests.engine_client.conftest import Driven
    from tests.server.serve_process import Serving

NOTHING: Any = None
FACTS = EngineInfo(
    None, NOTHING, RequestLimits(BlockRequirements(16), 8, 64, limited_by_max_length=False), 1, None
)
RUNS = Heartbeat(1, True, None)
SHORT = SamplingParams(max_new_tokens=1)


@dataclass(slots=True)
class Played:
    """Processes that do nothing, and the ends of their links, where a test plays the engine."""

    children: list[EngineProcess] = field(default_factory=list)
    links: list[socket.socket] = field(default_factory=list)

    def start(self) -> EngineProcess:
        ours, theirs = socket.socketpair()
        theirs.settimeout(PATIENCE)
        self.links.append(theirs)
        self.children.append(EngineProcess(subprocess.Popen(["sleep", "600"]), ours))
        return self.children[-1]

    def start_one_that_ends(self) -> EngineProcess:
        child = self.start()
        child.process.kill()
        self.links[-1].close()
        return child

    def end(self) -> None:
        for child, link in zip(self.children, self.links, strict=True):
            child.process.kill()
            child.process.wait()
            child.link.close()
            link.close()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setattr(subprocess_client, "_END_S", 0.05)  # they do not listen
    played = Played()
    yield played
    played.end()


def engine_of(
    played: Played, start: Callable[[], EngineProcess] | None = None, **limit: Any
) -> SubprocessClient:
    restart = start or played.start
    return SubprocessClient(
        played.start(), FACTS, "test", restart, RestartLimit(**{"delay_s": 0.001} | limit)
    )


async def error_of(texts: RequestGroup) -> BaseException | None:
    ((_, part),) = await asyncio.wait_for(texts.next(), PATIENCE)
    return part.error


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)


def refused(engine: SubprocessClient) -> Awaitable[BaseException | None]:
    texts = engine.open_group()
    texts.add(PROMPT, SHORT)
    return error_of(texts)


def join_restarts() -> None:
    for thread in threading.enumerate():
        if thread.name == "roseinfer restart":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_restarts_are_bounded_and_come_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(subprocess_client, "time", clock)
    limit = RestartLimit(most=5, window_s=600.0, delay_s=1.0)
    assert [limit.next_delay() for _ in range(7)] == [0, 1, 2, 4, 8, None, None]
    clock.now += 599.0
    assert limit.next_delay() is None
    clock.now += 1.0
    assert limit.next_delay() == 0


def test_one_that_ends_at_each_start_is_given_up(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve() -> None:
        engine = engine_of(played, played.start_one_that_ends, most=3)
        await engine.open()
        texts = engine.open_group()
        texts.add(PROMPT, LONG)
        checked = asyncio.ensure_future(engine.check_guide(NOTHING))
        await asyncio.sleep(0)
        played.children[0].process.kill()
        assert type(await error_of(texts)) is EngineRestarting
        with pytest.raises(EngineRestarting):
            await checked
        await until(lambda: engine.closed)
        assert (engine.restarts, engine.restarting, len(played.children)) == (3, False, 4)
        error = await refused(engine)
        assert type(error) is EngineStopped
        assert str(error) == f"{loading}: {limit}"
        engine.close()

    first = "test: the engine's process ended by SIGKILL: restarting it"
    loading = "the engine's process ended by SIGKILL while it loaded the model"
    limit = "it was restarted 3 times within 600 s, which is the limit; restart the server"
    asyncio.run(serve())
    assert capsys.readouterr().err.splitlines() == [
        first,
        f"test: {loading}: restarting it in 0.001 s",
        f"test: {loading}: restarting it in 0.002 s",
        f"test: {loading}: {limit}",
    ]


def test_nothing_of_an_earlier_process_reaches_a_text_of_a_later_one(played: Played) -> None:
    """Neither what it sent, nor what was to be sent to it."""

    async def serve() -> None:
        engine = engine_of(played)
        await engine.open()
        await until(lambda: engine._transport)
        transport: Any = engine._transport
        hearing = transport.get_protocol()
        texts = engine.open_group()
        texts.add(PROMPT, LONG)
        (order,) = await asyncio.to_thread(receive_message, played.links[0])
        played.links[0].sendall(frame_message(report(order.number, "old")))
        ((_, part),) = await texts.next()
        assert part.text == "old"
        played.children[0].process.kill()
        assert isinstance(await error_of(texts), EngineRestarting)
        assert engine.restarting
        assert engine.stats.running == 0
        await until(lambda: len(played.links) == 2)
        texts.cancel()
        new = engine.open_group()
        played.links[1].sendall(frame_message(FACTS))
        await until(lambda: not engine.restarting)
        new.add(PROMPT, SHORT)
        orders = await asyncio.to_thread(receive_message, played.links[1])
        number = orders[0].number
        assert orders == [AddRequest(number, PROMPT, SHORT)]
        assert number != order.number
        hearing.data_received(frame_message(report(number, "old")))
        played.links[1].sendall(frame_message(report(number, "new")))
        ((_, part),) = await asyncio.wait_for(new.next(), PATIENCE)
        assert part.text == "new"
        assert engine.restarts == 1
        engine.close()

    def report(number: int, text: str) -> EngineReport:
        return EngineReport([(number, *OutputDelta(1, text, [1]).to_tuple())], None, RUNS, [])

    asyncio.run(serve())


def test_an_engine_that_stops_in_a_process_that_runs_is_replaced_too(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients get the reason, and the log does not: it may have words of a prompt."""

    async def serve() -> None:
        engine = engine_of(played)
        await engine.open()
        texts = engine.open_group()
        texts.add(PROMPT, LONG)
        texts.add(PROMPT, LONG)
        first, second = (
            order.number for order in await asyncio.to_thread(receive_message, played.links[0])
        )
        failed = StepFailed(ValueError("secret"))
        parts = [
            (first, *OutputDelta(1, error=failed).to_tuple()),
            (second, *OutputDelta(1, error=EngineStopped("it stopped")).to_tuple()),
        ]
        report = EngineReport(parts, None, Heartbeat(9, False, "it stopped, with a secret"), [])
        played.links[0].sendall(frame_message(report))
        errors: dict[int, BaseException | None] = {}
        while len(errors) < 2:
            found = await asyncio.wait_for(texts.next(), PATIENCE)
            errors |= {at: part.error for at, part in found}
        assert str(errors[0]) == str(failed)
        assert type(errors[1]) is EngineRestarting
        assert str(errors[1]) == "it stopped, with a secret: it is restarting; try again later"
        await until(lambda: len(played.children) == 2)
        engine.close()

    asyncio.run(serve())
    assert capsys.readouterr().err == "test: the engine has stopped: restarting it\n"


@pytest.mark.parametrize("delayed", [False, True], ids=["while it loads", "before it begins"])
def test_it_is_closed_while_a_process_is_started(played: Played, *, delayed: bool) -> None:
    async def serve() -> None:
        engine = engine_of(played, delay_s=600.0)
        if delayed:
            engine._limit.next_delay()
        await engine.open()
        played.children[0].process.kill()
        await until(lambda: engine.restarting and (delayed or len(played.children) == 2))
        begun = time.monotonic()
        await asyncio.to_thread(engine.close)
        assert time.monotonic() - begun < SOON
        await until(lambda: engine.closed)
        assert type(await refused(engine)) is EngineStopped
        await asyncio.to_thread(join_restarts)
        assert len(played.children) == 2 - delayed
        assert all(child.process.poll() is not None for child in played.children)

    asyncio.run(serve())


def test_one_that_was_closed_before_a_process_is_started_starts_none(played: Played) -> None:
    async def serve() -> None:
        engine = engine_of(played)
        await engine.open()
        with engine._starting:
            played.children[0].process.kill()
            await until(lambda: engine.restarting)
            engine._closing.set()
        await asyncio.to_thread(join_restarts)
        assert len(played.children) == 1

    asyncio.run(serve())


def test_it_tells_clients_to_retry_when_it_will_have_loaded(played: Played) -> None:
    async def retry_after(load_s: float) -> int:
        engine = engine_of(played)
        played.children[-1].load_s = load_s
        await engine.open()
        played.children[-1].process.kill()
        await until(lambda: engine.restarting)
        error = await refused(engine)
        assert isinstance(error, EngineRestarting)
        engine.close()
        return error.retry_after

    assert asyncio.run(retry_after(0.0)) == 1
    assert 20 < asyncio.run(retry_after(40.0)) <= 40
    assert asyncio.run(retry_after(4000.0)) == 60


def test_a_stall_is_work_without_a_step(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to do is none, nor is a first step that compiles, nor texts that wait for readers."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    monkeypatch.setattr(subprocess_client, "time", clock := Clock())
    engine = engine_of(played)

    def after(seconds: float, rounds: int | None = None, *, busy: bool = True) -> float:
        clock.now += seconds
        if rounds is not None:
            engine.handle_report(
                played.children[0], EngineReport([], None, Heartbeat(rounds, busy, None), [])
            )
        return engine.stalled_s

    assert after(1000) == 0  # idle
    texts = engine.open_group()
    texts.add(PROMPT, LONG)
    assert after(9) == 9  # not a word
    assert after(50, 0) == 0
    assert after(50, 0) == 0
    assert after(5, 1) == 0
    assert after(7, 1) == 7
    assert after(3, 2) == 0
    assert after(4, 2, busy=False) == 0
    assert after(2, 2) == 2
    texts.cancel()
    assert after(100) == 0
    engine.open_group().add(PROMPT, LONG)
    assert after(1) == 1


def test_a_step_that_hangs_is_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("tiny", device="cpu", kv_cache_tokens=256)
    begun, goes_on = threading.Event(), threading.Event()
    step = llm.engine.step

    def hang() -> Any:
        begun.set()
        assert goes_on.wait(PATIENCE)
        return step()

    class Reads:
        is_closed = False

        def put(self, news: Any) -> bool:
            ended.extend(each for _, each in news if each.finish_reason is not None)
            return True

    monkeypatch.setattr(llm.engine, "step", hang)
    thread, ended = EngineThread(llm), list[Any]()
    assert (thread.busy, thread.stop_reason) == (False, None)
    thread.submit(Listener(Reads()), "a", SHORT, llm.engine.new_completion_text(SHORT), None)
    assert begun.wait(PATIENCE)
    rounds = thread.num_iterations
    assert thread.busy
    goes_on.set()
    end = time.monotonic() + PATIENCE
    while thread.busy or not ended:
        assert time.monotonic() < end
        time.sleep(0.001)
    thread.close()
    assert thread.num_iterations > rounds
    assert thread.stop_reason == "the engine was closed"


def test_a_text_that_waits_for_its_reader_is_no_stall(driven: Driven) -> None:
    async def paused() -> None:
        texts = driven.engine.open_group()
        texts.add(PROMPT, LONG)
        await until(lambda: driven.engine.stats.running)
        await until(lambda: not driven.engine.stats.running)
        rounds = driven.engine._rounds
        assert rounds > 0
        before = driven.engine._progress_at
        await until(lambda: driven.engine._progress_at > before + 1.5)  # later messages say it
        assert driven.engine._open
        texts.cancel()

    driven.run(paused())


@pytest.fixture(scope="module")
def supervised() -> Iterator[Serving]:
    with serving("--max-batch-size", "12", "--stall-seconds", "2") as found:
        yield found


def test_a_process_that_is_stopped_fails_probes_until_it_goes_on(supervised: Serving) -> None:
    reasons: list[str] = []

    def complete(client: Any) -> None:
        answer = client.completions.create(**LONG_BODY, max_tokens=30)
        reasons.append(answer.choices[0].finish_reason)

    with client_of(supervised) as client:
        child = child_of(supervised)
        os.kill(child, signal.SIGSTOP)
        try:
            time.sleep(2.5)  # idle all that time
            assert status_of(f"{supervised.url}/health") == 200
            asking = threading.Thread(target=complete, args=(client,))
            asking.start()
            await_status(f"{supervised.url}/health", 503)
            status, told = ask(supervised.port, "/ready")
            assert status == 503
            reason = json.loads(told)["reason"]
            assert re.fullmatch(
                r"the engine is stalled: it has work, but no step for \d+ s", reason
            )
        finally:
            os.kill(child, signal.SIGCONT)
        for path in ("health", "ready"):
            await_status(f"{supervised.url}/{path}", 200)
        asking.join(PATIENCE)
        assert reasons == ["length"]


def test_an_engine_that_is_killed_ends_streams_at_once_and_is_started_again(
    supervised: Serving,
) -> None:
    """A client that retries gets the text that it would have had before."""
    restarts = 'roseinfer:engine_restarts_total{engine="0",model_name="tiny"}'
    url = supervised.url
    body: dict[str, Any] = GREEDY | {"prompt": "Once upon a time", "max_tokens": 60}
    retrying = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8, timeout=PATIENCE)
    with client_of(supervised) as client, retrying:
        text = client.completions.create(**body).choices[0].text
        assert figure(supervised, restarts) == 0
        streams = [
            client.completions.create(**LONG_BODY, n=4, max_tokens=900, stream=True)
            for _ in range(3)
        ]
        for stream in streams:
            next(stream)
        child = child_of(supervised)
        os.kill(child, signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            with pytest.raises(
                openai.APIError, match="the engine's process ended by SIGKILL"
            ) as ended:
                list(stream)
            assert ended.value.code == "engine_restarting"
        assert time.monotonic() - killed < SOON
        assert ask(supervised.port, "/health") == (200, b'{"alive":true}')
        told = b'{"ready":false,"reason":"the engine is restarting"}'
        assert ask(supervised.port, "/ready") == (503, told)
        with pytest.raises(openai.InternalServerError) as refusal:
            client.completions.create(**body)
        assert (refusal.value.status_code, refusal.value.code) == (503, "engine_restarting")
        assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 60
        assert retrying.completions.create(**body).choices[0].text == text
        assert ask(supervised.port, "/ready") == (200, b'{"ready":true}')
        assert figure(supervised, restarts) == 1
        assert not runs(child)
        assert child_of(supervised) != child
    said = "roseinfer serve: the engine's process ended by SIGKILL: restarting it\n"
    assert supervised.said.count(said) == 1
