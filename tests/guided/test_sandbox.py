"""Sandbox of guides: hostile ones are rejected, and affect neither the engine nor other guides."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import BadArgument, ConfigError, EngineConfig, Guide, SamplingParams
from roseinfer.errors import TooBusy
from roseinfer.guided import sandbox as trial_module
from roseinfer.guided.grammar import read_tokenizer
from roseinfer.guided.sandbox import GuideSandbox, Outcome, TrialResult
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.server.api_errors import to_api_error
from roseinfer.server.schemas.tools import Function, call_guide
from tests.engine.continuations import one
from tests.guided.constraints import engine, generate_all
from tests.guided.hostile_guides import allows, new_compiler, run
from tests.python_process import run_python

if TYPE_CHECKING:
    from roseinfer.guided.compiler import GuideCompiler

TIMEOUT_S = 60
MAX_SAFE = (1 << 53) - 1
LOWEST = -(1 << 63)
FREE = SamplingParams(max_new_tokens=12)


def integer(**bounds: float) -> dict[str, Any]:
    return {"type": "integer"} | bounds


CRASHES = [
    Guide(json_schema=integer(minimum=LOWEST, maximum=LOWEST)),
    Guide(json_schema=integer(minimum=LOWEST + 1, maximum=LOWEST + 1)),
    Guide(json_schema=integer(minimum=-1e30, maximum=-1e29)),
]
HEAVY = [
    Guide(json_schema=integer(multipleOf=2147483648)),
    Guide(json_schema=integer(multipleOf=1 << 24)),
    Guide(regex="a?" * 30_000),
]
INEXACT = [
    integer(minimum=LOWEST, maximum=LOWEST),
    integer(minimum=LOWEST, maximum=-LOWEST - 1),
    integer(minimum=-1e30, maximum=-1e29),
    integer(minimum=10**300),
    integer(minimum=MAX_SAFE + 1),
    integer(exclusiveMaximum=-MAX_SAFE - 1),
    {"type": "number", "maximum": MAX_SAFE + 2},
    {"const": MAX_SAFE + 2},
    {"enum": ["a", {"minimum": [LOWEST]}]},
    {"type": "object", "properties": {"default": integer(minimum=1 << 60)}},
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"allOf": [integer(maximum=1e16)]}]}},
    {"$defs": {"examples": integer(minimum=1 << 60)}, "$ref": "#/$defs/examples"},
    {"components": {"a": integer(minimum=1 << 60)}, "$ref": "#/components/a"},
]
EXACT = [
    integer(minimum=-MAX_SAFE, maximum=MAX_SAFE),
    integer(minimum=MAX_SAFE),
    integer(exclusiveMinimum=MAX_SAFE - 1, maximum=MAX_SAFE),
    {"type": "object", "properties": {"minimum": integer(minimum=3)}},
    {"type": "integer", "default": {"minimum": 1 << 70}, "examples": [1 << 70]},
    {"enum": ["a", {"minimum": 5}, 1e300]},
]


def sandbox_of(guides: GuideCompiler) -> GuideSandbox:
    guides.new_matcher(Guide(regex="first"))
    assert guides._tools is not None
    return guides._tools[2]


@pytest.fixture(scope="module")
def guides() -> GuideCompiler:
    return new_compiler()


@pytest.fixture(scope="module")
def sandbox(guides: GuideCompiler) -> GuideSandbox:
    return sandbox_of(guides)


def worker_process(sandbox: GuideSandbox, lane: int = 0) -> int:
    """Return the worker process of a lane."""
    link = sandbox._workers[lane]._end
    assert link is not None
    peeked = link.peek()
    assert peeked is not None
    pid: int = peeked[2][0].pid
    return pid


@pytest.mark.parametrize("guide", CRASHES, ids=str)
def test_compiler_crash_is_a_rejection(sandbox: GuideSandbox, guide: Guide) -> None:
    before = worker_process(sandbox)
    with pytest.raises(BadArgument, match="cannot be compiled: the compiler crashed on it"):
        sandbox.validate(guide)
    sandbox.validate(Guide(choice=("yes", str(guide.json_schema))))
    assert worker_process(sandbox) == before


@pytest.mark.parametrize("guide", HEAVY, ids=lambda guide: str(guide)[:60])
def test_guide_beyond_the_limits_is_rejected(guides: GuideCompiler, guide: Guide) -> None:
    with pytest.raises(BadArgument, match=r"more than (0\.3 s of processor|128 MB of memory)"):
        guides.new_matcher(guide)
    assert allows(guides, Guide(regex="[ab]c"), "bc")


def test_memory_limit_applies_alone() -> None:
    sandbox = sandbox_of(new_compiler(cpu_seconds=60.0, memory_mb=64))
    with pytest.raises(BadArgument, match=r"more than 64 MB of memory .*guide_memory_mb"):
        sandbox.validate(HEAVY[2])


def test_time_limit_applies_alone() -> None:
    sandbox = sandbox_of(new_compiler(cpu_seconds=0.3, memory_mb=1 << 14))
    for guide in HEAVY:
        with pytest.raises(BadArgument, match=r"more than 0\.3 s of processor time to compile"):
            sandbox.validate(guide)


def test_guide_with_a_slow_token_is_rejected() -> None:
    """The guide compiles in time, but would delay a step of the engine."""
    sandbox = sandbox_of(new_compiler(cpu_seconds=3.0, memory_mb=2000))
    with pytest.raises(BadArgument, match=r"or a tenth of it for a token \(guide_cpu_seconds\)"):
        sandbox.validate(Guide(regex="a?" * 12_000))


def test_hostile_schemas_do_not_affect_other_requests(device: str) -> None:
    pattern = {"type": "string", "pattern": "a?" * 30_000}
    hostile = [pattern, integer(multipleOf=1 << 24), integer(minimum=10**300)]
    params = [SamplingParams(guide=Guide(json_schema=each)) for each in hostile]
    llm = engine(device, guide_cpu_seconds=0.3)
    outputs = generate_all(llm, [[1]] * 4, [*params, FREE])
    assert "the constraint cannot be compiled" in str(outputs[0].error)
    assert "to compile" in str(outputs[1].error)
    assert "are exact" in str(outputs[2].error)
    assert outputs[3].token_ids == one(engine(device), [1], FREE).token_ids


@pytest.mark.parametrize("schema", INEXACT, ids=str)
def test_inexact_numbers_are_rejected(guides: GuideCompiler, schema: dict[str, Any]) -> None:
    tool = Function(name="f", parameters={"type": "object", "properties": {"x": schema}})
    for guide in (
        Guide(json_schema=schema),
        Guide(grammar=f'start: "a" %json {json.dumps(schema)}'),
        call_guide([tool], required=False),
    ):
        with pytest.raises(
            BadArgument, match=f"beyond {MAX_SAFE} .* up to which numbers are exact"
        ):
            guides.new_matcher(guide)


@pytest.mark.parametrize("schema", EXACT, ids=str)
def test_exact_numbers_are_accepted(guides: GuideCompiler, schema: dict[str, Any]) -> None:
    guides.new_matcher(Guide(json_schema=schema))


def test_bounds_at_the_limit_are_exact(guides: GuideCompiler) -> None:
    both = Guide(json_schema=integer(minimum=-MAX_SAFE, maximum=MAX_SAFE))
    for number, within in (
        (MAX_SAFE, True),
        (-MAX_SAFE, True),
        (MAX_SAFE + 1, False),
        (-MAX_SAFE - 1, False),
    ):
        assert allows(guides, both, str(number)) == within
    above = Guide(json_schema=integer(exclusiveMinimum=MAX_SAFE - 1))
    assert [allows(guides, above, str(MAX_SAFE + offset)) for offset in (-1, 0, 1)] == [
        False,
        True,
        True,
    ]


@pytest.mark.slow
def test_random_hostile_guides() -> None:
    outcomes = run(seed=1, guides=40)
    assert min(outcomes[end] for end in ("followed", "exact", "are exact", "processor time")) > 0


def test_rejected_guide_is_cached(sandbox: GuideSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    lines_tried: list[bytes] = []

    def run_trial(line: bytes) -> TrialResult:
        lines_tried.append(line)
        return TrialResult(Outcome.CRASHED, "bad")

    monkeypatch.setattr(sandbox._workers[0], "run_trial", run_trial)
    monkeypatch.setattr(sandbox, "_results", type(sandbox._results)())
    monkeypatch.setattr(trial_module, "_MAX_CACHED_RESULTS", 2)
    for word in (*"aabca", "a"):
        with pytest.raises(BadArgument, match="bad"):
            sandbox.validate(Guide(regex=word))
    assert len(lines_tried) == 4  # the first is evicted by the third
    assert len(sandbox._results) == 2


def test_killed_worker_is_replaced(sandbox: GuideSandbox) -> None:
    sandbox.validate(Guide(regex="before"))
    before = worker_process(sandbox)
    os.kill(before, signal.SIGKILL)
    sandbox.validate(Guide(regex="after"))
    assert worker_process(sandbox) != before
    assert not Path(f"/proc/{before}").exists()


def test_suspended_worker_is_replaced(
    sandbox: GuideSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.validate(Guide(regex="going"))
    before = worker_process(sandbox)
    os.kill(before, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(sandbox._workers[0], "_wall_s", 0.3)
        with pytest.raises(BadArgument, match=r"did not compile within 0\.3 s of wall-clock time"):
            sandbox.validate(Guide(regex="still"))
    sandbox.validate(Guide(regex="still"))  # the guide was not at fault
    assert worker_process(sandbox) != before


def test_worker_does_not_import_torch(sandbox: GuideSandbox) -> None:
    sandbox.validate(Guide(regex="loaded"))
    loaded = Path(f"/proc/{worker_process(sandbox)}/maps").read_text()
    assert "llguidance" in loaded
    assert not any(name in loaded for name in ("torch", "numpy", "triton"))
    code = """
        import sys
        import roseinfer.guided.sandbox
        print(*sorted(name for name in sys.modules if name.startswith("roseinfer")))
    """
    parts = ("errors", "guided", "guided.grammar", "guided.guide")
    names = ["roseinfer", *(f"roseinfer.{part}" for part in parts), "roseinfer.guided.sandbox"]
    assert run_python(code).split() == names


def test_worker_inherits_no_other_socket(sandbox: GuideSandbox) -> None:
    """A server's sockets stay open as long as any process has them."""
    with ThreadPoolExecutor(1):
        sandbox.validate(Guide(regex="links"))
        files = Path(f"/proc/{worker_process(sandbox)}/fd")
        sockets = [file for file in files.iterdir() if os.readlink(file).startswith("socket:")]
    assert len(sockets) == 1


def await_exit(pid: int) -> None:
    end = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the worker does not end"
        time.sleep(0.01)


@pytest.mark.slow
def test_worker_ends_with_its_parent(tmp_path: Path) -> None:
    source, _ = read_tokenizer(byte_tokenizer(), 257)
    (tmp_path / "tokenizer.json").write_text(source.json)
    code = f"""
        import os
        from pathlib import Path
        from roseinfer.guided.grammar import SerializedTokenizer
        from roseinfer.guided.guide import Guide
        from roseinfer.guided.sandbox import GuideSandbox
        text = Path({str(tmp_path / "tokenizer.json")!r}).read_text()
        source = SerializedTokenizer(text, {source.vocabulary}, {source.grammar_end_token})
        trial = GuideSandbox(source, 60.0, 512)
        trial.validate(Guide(regex="a"))
        print(trial._workers[0]._end.peek()[2][0].pid, flush=True)
        os._exit(0)
    """
    await_exit(int(run_python(code)))


def test_worker_ends_with_its_sandbox() -> None:
    sandbox = sandbox_of(new_compiler())
    pid = worker_process(sandbox)
    del sandbox
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()  # nor as a zombie


def test_sandbox_starts_with_the_first_guide(device: str) -> None:
    llm = engine(device)
    one(llm, [1], FREE)
    assert llm.engine._guide_compiler._tools is None
    one(llm, [1], SamplingParams(guide=Guide(regex="a")))
    assert llm.engine._guide_compiler._tools is not None
    quick, slow = llm.engine._guide_compiler._tools[2]._workers
    assert quick._link is not None
    assert slow._link is None


def test_trial_thread_that_ends_early_is_a_crash() -> None:
    code = """
        import socket, sys
        from roseinfer.guided import sandbox as trial_worker
        trial_worker._limit_memory = lambda pages, megabytes: sys.exit()
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        trial_worker._try_in_copy(theirs, b"{}", None, 1.0, 64)
        print(ours.recv(999).decode())
    """
    assert json.loads(run_python(code))[0] == Outcome.CRASHED


@pytest.mark.slow
def test_slow_guides_delay_only_slow_guides(guides: GuideCompiler) -> None:
    sandbox = sandbox_of(guides)
    numbers = integer(multipleOf=1 << 24)
    heavy = [
        Guide(json_schema={"type": "array", "items": numbers, "minItems": offset + 1})
        for offset in range(5)
    ]
    with ThreadPoolExecutor(4) as threads:
        with sandbox._workers[1]._lock:  # as if a guide were tried there
            waiting = [threads.submit(sandbox.validate, guide) for guide in heavy[:4]]
            end = time.monotonic() + TIMEOUT_S
            while sandbox._slow_trials._value:
                assert time.monotonic() < end
                time.sleep(0.01)
            guides.new_matcher(Guide(regex="quick"))
            with pytest.raises(TooBusy, match="try again later") as busy:
                sandbox.validate(heavy[4])
        for each in waiting:
            with pytest.raises(BadArgument, match=r"processor time|memory"):
                each.result(TIMEOUT_S)
    error = to_api_error(busy.value)
    assert (error.status, error.headers) == (429, {"Retry-After": "1"})
    with pytest.raises(BadArgument):  # no result is cached for a guide that was not tried
        sandbox.validate(heavy[4])


def test_total_memory_of_grammars_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached grammars may take as much as one grammar may, and those in use four times as much."""
    guides = new_compiler(memory_mb=128)
    sandbox_of(guides)
    monkeypatch.setattr(GuideSandbox, "validate", lambda *_: 60)
    texts = [guides.new_matcher(Guide(choice=(word,))) for word in "abcdefgh"]
    assert [guide.choice for guide in guides._grammar_cache] == [("g",), ("h",)]
    guides.new_matcher(Guide(choice=("h",)))
    with pytest.raises(TooBusy, match="480 MB of memory, and this one takes 60 MB more; try"):
        guides.new_matcher(Guide(choice=("i",)))
    texts.pop()
    del texts[:2]
    gc.collect()
    guides.new_matcher(Guide(choice=("i",)))


def test_memory_of_a_grammar_is_measured(sandbox: GuideSandbox) -> None:
    large = {"enum": [f"word {number}" for number in range(3000)]}
    assert sandbox.validate(Guide(regex="small")) < sandbox.validate(Guide(json_schema=large)) < 128


@pytest.mark.parametrize(
    "settings", [{"guide_cpu_seconds": 0}, {"guide_cpu_seconds": "2"}, {"guide_memory_mb": 1}]
)
def test_invalid_limits_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} must be"):
        EngineConfig(**settings)
