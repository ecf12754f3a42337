"""Supervision of the engine process: restarts, closing and stalls."""

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
from tests.engine_client.test_serve_subprocess import (
    GREEDY,
    PROMPT_S,
    child_of,
    is_running,
    metric,
    request,
)
from tests.engine_client.test_subprocess_client import LONG, PROMPT
from tests.server.serve_process import PATIENCE, serving
from tests.server.test_shutdown import LONG as LONG_BODY
from tests.server.test_shutdown import await_status, client_of, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from roseinfer.engine_client.protocol import RequestGroup
    from tests.engine_client.conftest import EngineDriver
    from tests.server.serve_process import Serving

NOTHING: Any = None
INFO = EngineInfo(
    None, NOTHING, RequestLimits(BlockRequirements(16), 8, 64, limited_by_max_length=False), 1, None
)
RUNNING = Heartbeat(1, True, None)
SHORT = SamplingParams(max_new_tokens=1)


@dataclass(slots=True)
class FakeProcesses:
    """Processes that do nothing, and the ends of their connections, which a test answers."""

    children: list[EngineProcess] = field(default_factory=list)
    links: list[socket.socket] = field(default_factory=list)

    def start(self) -> EngineProcess:
        ours, theirs = socket.socketpair()
        theirs.settimeout(PATIENCE)
        self.links.append(theirs)
        self.children.append(EngineProcess(subprocess.Popen(["sleep", "600"]), ours))
        return self.children[-1]

    def start_and_end(self) -> EngineProcess:
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
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcesses]:
    monkeypatch.setattr(subprocess_client, "_END_S", 0.05)  # they do not react
    processes = FakeProcesses()
    yield processes
    processes.end()


def client_of_processes(
    processes: FakeProcesses, start: Callable[[], EngineProcess] | None = None, **limit: Any
) -> SubprocessClient:
    restart = start or processes.start
    return SubprocessClient(
        processes.start(), INFO, "test", restart, RestartLimit(**{"delay_s": 0.001} | limit)
    )


async def error_of(group: RequestGroup) -> BaseException | None:
    ((_, part),) = await asyncio.wait_for(group.next(), PATIENCE)
    return part.error


async def await_condition(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)


def error_of_request(engine: SubprocessClient) -> Awaitable[BaseException | None]:
    group = engine.open_group()
    group.add(PROMPT, SHORT)
    return error_of(group)


def join_restarts() -> None:
    for thread in threading.enumerate():
        if thread.name == "roseinfer restart":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_restarts_are_limited_with_growing_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(subprocess_client, "time", clock)
    limit = RestartLimit(max_restarts=5, window_s=600.0, delay_s=1.0)
    assert [limit.next_delay() for _ in range(7)] == [0, 1, 2, 4, 8, None, None]
    clock.now += 599.0
    assert limit.next_delay() is None
    clock.now += 1.0
    assert limit.next_delay() == 0


def test_engine_is_stopped_after_too_many_restarts(
    processes: FakeProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve() -> None:
        engine = client_of_processes(processes, processes.start_and_end, max_restarts=3)
        await engine.open()
        group = engine.open_group()
        group.add(PROMPT, LONG)
        checked = asyncio.ensure_future(engine.check_guide(NOTHING))
        await asyncio.sleep(0)
        processes.children[0].process.kill()
        assert type(await error_of(group)) is EngineRestarting
        with pytest.raises(EngineRestarting):
            await checked
        await await_condition(lambda: engine.closed)
        assert (engine.restarts, engine.restarting, len(processes.children)) == (3, False, 4)
        error = await error_of_request(engine)
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


def test_messages_of_an_earlier_process_are_dropped(processes: FakeProcesses) -> None:
    """Neither what it sent, nor what was to be sent to it."""

    async def serve() -> None:
        engine = client_of_processes(processes)
        await engine.open()
        await await_condition(lambda: engine._transport)
        transport: Any = engine._transport
        protocol = transport.get_protocol()
        group = engine.open_group()
        group.add(PROMPT, LONG)
        (command,) = await asyncio.to_thread(receive_message, processes.links[0])
        processes.links[0].sendall(frame_message(report(command.number, "old")))
        ((_, part),) = await group.next()
        assert part.text == "old"
        processes.children[0].process.kill()
        assert isinstance(await error_of(group), EngineRestarting)
        assert engine.restarting
        assert engine.stats.running == 0
        await await_condition(lambda: len(processes.links) == 2)
        group.cancel()
        new = engine.open_group()
        processes.links[1].sendall(frame_message(INFO))
        await await_condition(lambda: not engine.restarting)
        new.add(PROMPT, SHORT)
        commands = await asyncio.to_thread(receive_message, processes.links[1])
        number = commands[0].number
        assert commands == [AddRequest(number, PROMPT, SHORT)]
        assert number != command.number
        protocol.data_received(frame_message(report(number, "old")))
        processes.links[1].sendall(frame_message(report(number, "new")))
        ((_, part),) = await asyncio.wait_for(new.next(), PATIENCE)
        assert part.text == "new"
        assert engine.restarts == 1
        engine.close()

    def report(number: int, text: str) -> EngineReport:
        return EngineReport([(number, *OutputDelta(1, text, [1]).to_tuple())], None, RUNNING, [])

    asyncio.run(serve())


def test_stopped_engine_in_a_live_process_is_replaced(
    processes: FakeProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients get the reason, and the log does not: it may contain words of a prompt."""

    async def serve() -> None:
        engine = client_of_processes(processes)
        await engine.open()
        group = engine.open_group()
        group.add(PROMPT, LONG)
        group.add(PROMPT, LONG)
        first, second = (
            command.number
            for command in await asyncio.to_thread(receive_message, processes.links[0])
        )
        failure = StepFailed(ValueError("secret"))
        parts = [
            (first, *OutputDelta(1, error=failure).to_tuple()),
            (second, *OutputDelta(1, error=EngineStopped("it stopped")).to_tuple()),
        ]
        report = EngineReport(parts, None, Heartbeat(9, False, "it stopped, with a secret"), [])
        processes.links[0].sendall(frame_message(report))
        errors: dict[int, BaseException | None] = {}
        while len(errors) < 2:
            parts_read = await asyncio.wait_for(group.next(), PATIENCE)
            errors |= {at: part.error for at, part in parts_read}
        assert str(errors[0]) == str(failure)
        assert type(errors[1]) is EngineRestarting
        assert str(errors[1]) == "it stopped, with a secret: it is restarting; try again later"
        await await_condition(lambda: len(processes.children) == 2)
        engine.close()

    asyncio.run(serve())
    assert capsys.readouterr().err == "test: the engine has stopped: restarting it\n"


@pytest.mark.parametrize("delayed", [False, True], ids=["while loading", "before the start"])
def test_client_is_closed_during_a_restart(processes: FakeProcesses, *, delayed: bool) -> None:
    async def serve() -> None:
        engine = client_of_processes(processes, delay_s=600.0)
        if delayed:
            engine._limit.next_delay()
        await engine.open()
        processes.children[0].process.kill()
        await await_condition(
            lambda: engine.restarting and (delayed or len(processes.children) == 2)
        )
        started = time.monotonic()
        await asyncio.to_thread(engine.close)
        assert time.monotonic() - started < PROMPT_S
        await await_condition(lambda: engine.closed)
        assert type(await error_of_request(engine)) is EngineStopped
        await asyncio.to_thread(join_restarts)
        assert len(processes.children) == 2 - delayed
        assert all(child.process.poll() is not None for child in processes.children)

    asyncio.run(serve())


def test_client_closed_before_a_restart_starts_no_process(processes: FakeProcesses) -> None:
    async def serve() -> None:
        engine = client_of_processes(processes)
        await engine.open()
        with engine._starting:
            processes.children[0].process.kill()
            await await_condition(lambda: engine.restarting)
            engine._closing.set()
        await asyncio.to_thread(join_restarts)
        assert len(processes.children) == 1

    asyncio.run(serve())


def test_retry_after_covers_the_loading_time(processes: FakeProcesses) -> None:
    async def retry_after(load_s: float) -> int:
        engine = client_of_processes(processes)
        processes.children[-1].load_s = load_s
        await engine.open()
        processes.children[-1].process.kill()
        await await_condition(lambda: engine.restarting)
        error = await error_of_request(engine)
        assert isinstance(error, EngineRestarting)
        engine.close()
        return error.retry_after

    assert asyncio.run(retry_after(0.0)) == 1
    assert 20 < asyncio.run(retry_after(40.0)) <= 40
    assert asyncio.run(retry_after(4000.0)) == 60


def test_stall_is_work_without_a_step(
    processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle time, a first step that compiles, and waiting for readers are not stalls."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    monkeypatch.setattr(subprocess_client, "time", clock := Clock())
    engine = client_of_processes(processes)

    def after(seconds: float, rounds: int | None = None, *, busy: bool = True) -> float:
        clock.now += seconds
        if rounds is not None:
            engine.handle_report(
                processes.children[0], EngineReport([], None, Heartbeat(rounds, busy, None), [])
            )
        return engine.stalled_s

    assert after(1000) == 0  # idle
    group = engine.open_group()
    group.add(PROMPT, LONG)
    assert after(9) == 9  # no heartbeat
    assert after(50, 0) == 0
    assert after(50, 0) == 0
    assert after(5, 1) == 0
    assert after(7, 1) == 7
    assert after(3, 2) == 0
    assert after(4, 2, busy=False) == 0
    assert after(2, 2) == 2
    group.cancel()
    assert after(100) == 0
    engine.open_group().add(PROMPT, LONG)
    assert after(1) == 1


def test_hanging_step_is_not_counted_as_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("tiny", device="cpu", kv_cache_tokens=256)
    started, proceed = threading.Event(), threading.Event()
    step = llm.engine.step

    def hang() -> Any:
        started.set()
        assert proceed.wait(PATIENCE)
        return step()

    class Reader:
        is_closed = False

        def put(self, news: Any) -> bool:
            last_updates.extend(each for _, each in news if each.finish_reason is not None)
            return True

    monkeypatch.setattr(llm.engine, "step", hang)
    thread, last_updates = EngineThread(llm), list[Any]()
    assert (thread.busy, thread.stop_reason) == (False, None)
    thread.submit(Listener(Reader()), "a", SHORT, llm.engine.new_completion_text(SHORT), None)
    assert started.wait(PATIENCE)
    rounds = thread.num_iterations
    assert thread.busy
    proceed.set()
    end = time.monotonic() + PATIENCE
    while thread.busy or not last_updates:
        assert time.monotonic() < end
        time.sleep(0.001)
    thread.close()
    assert thread.num_iterations > rounds
    assert thread.stop_reason == "the engine was closed"


@pytest.mark.slow
def test_unread_stream_is_not_a_stall(engine_driver: EngineDriver) -> None:
    async def read_slowly() -> None:
        group = engine_driver.engine.open_group()
        group.add(PROMPT, LONG)
        await await_condition(lambda: engine_driver.engine.stats.running)
        await await_condition(lambda: not engine_driver.engine.stats.running)
        rounds = engine_driver.engine._rounds
        assert rounds > 0
        before = engine_driver.engine._progress_at
        await await_condition(
            lambda: engine_driver.engine._progress_at > before + 1.5
        )  # by later heartbeats
        assert engine_driver.engine._open
        group.cancel()

    engine_driver.run(read_slowly())


@pytest.fixture(scope="module")
def supervised() -> Iterator[Serving]:
    with serving("--max-batch-size", "12", "--stall-seconds", "2") as parts_read:
        yield parts_read


@pytest.mark.slow
def test_suspended_process_fails_probes_until_it_continues(supervised: Serving) -> None:
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
            client_thread = threading.Thread(target=complete, args=(client,))
            client_thread.start()
            await_status(f"{supervised.url}/health", 503)
            status, body_read = request(supervised.port, "/ready")
            assert status == 503
            reason = json.loads(body_read)["reason"]
            assert re.fullmatch(
                r"the engine is stalled: it has work, but no step for \d+ s", reason
            )
        finally:
            os.kill(child, signal.SIGCONT)
        for path in ("health", "ready"):
            await_status(f"{supervised.url}/{path}", 200)
        client_thread.join(PATIENCE)
        assert reasons == ["length"]


@pytest.mark.slow
def test_killed_engine_ends_streams_at_once_and_is_restarted(
    supervised: Serving,
) -> None:
    """A client that retries gets the same completion."""
    restarts = 'roseinfer:engine_restarts_total{engine="0",model_name="tiny"}'
    url = supervised.url
    body: dict[str, Any] = GREEDY | {"prompt": "Once upon a time", "max_tokens": 60}
    retrying = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8, timeout=PATIENCE)
    with client_of(supervised) as client, retrying:
        text = client.completions.create(**body).choices[0].text
        assert metric(supervised, restarts) == 0
        streams = [
            client.completions.create(**LONG_BODY, n=4, max_tokens=900, stream=True)
            for _ in range(3)
        ]
        for stream in streams:
            next(stream)
        child = child_of(supervised)
        os.kill(child, signal.SIGKILL)
        killed_at = time.monotonic()
        for stream in streams:
            with pytest.raises(
                openai.APIError, match="the engine's process ended by SIGKILL"
            ) as last_updates:
                list(stream)
            assert last_updates.value.code == "engine_restarting"
        assert time.monotonic() - killed_at < PROMPT_S
        assert request(supervised.port, "/health") == (200, b'{"alive":true}')
        body_read = b'{"ready":false,"reason":"the engine is restarting"}'
        assert request(supervised.port, "/ready") == (503, body_read)
        with pytest.raises(openai.InternalServerError) as rejection:
            client.completions.create(**body)
        assert (rejection.value.status_code, rejection.value.code) == (503, "engine_restarting")
        assert 1 <= int(rejection.value.response.headers["retry-after"]) <= 60
        assert retrying.completions.create(**body).choices[0].text == text
        assert request(supervised.port, "/ready") == (200, b'{"ready":true}')
        assert metric(supervised, restarts) == 1
        assert not is_running(child)
        assert child_of(supervised) != child
    message = "roseinfer serve: the engine's process ended by SIGKILL: restarting it\n"
    assert supervised.stderr_lines.count(message) == 1
