"""Hostile guides are refused with a reason, and harm neither the engine nor other guides."""

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

from roseinfer import BadArgument, ConfigError, EngineConfig, Guide, SamplingParams, byte_tokenizer
from roseinfer.errors import TooBusy
from roseinfer.guided import sandbox as trial_module
from roseinfer.guided.grammar import read_tokenizer
from roseinfer.guided.sandbox import GuideSandbox, Outcome, TrialResult
from roseinfer.server.api_errors import to_api_error
from roseinfer.server.schemas.tools import Function, call_guide
from tests.engine.continuations import one
from tests.guided.constraints import engine, together
from tests.guided.hostile_guides import allows, new_compiler, run
from tests.python_process import run_python

if TYPE_CHECKING:
    from roseinfer.guided.compiler import GuideCompiler

PATIENCE = 60
SAFE = (1 << 53) - 1
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
    integer(minimum=SAFE + 1),
    integer(exclusiveMaximum=-SAFE - 1),
    {"type": "number", "maximum": SAFE + 2},
    {"const": SAFE + 2},
    {"enum": ["a", {"minimum": [LOWEST]}]},
    {"type": "object", "properties": {"default": integer(minimum=1 << 60)}},
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"allOf": [integer(maximum=1e16)]}]}},
    {"$defs": {"examples": integer(minimum=1 << 60)}, "$ref": "#/$defs/examples"},
    {"components": {"a": integer(minimum=1 << 60)}, "$ref": "#/components/a"},
]
EXACT = [
    integer(minimum=-SAFE, maximum=SAFE),
    integer(minimum=SAFE),
    integer(exclusiveMinimum=SAFE - 1, maximum=SAFE),
    {"type": "object", "properties": {"minimum": integer(minimum=3)}},
    {"type": "integer", "default": {"minimum": 1 << 70}, "examples": [1 << 70]},
    {"enum": ["a", {"minimum": 5}, 1e300]},
]


def compiled(guides: GuideCompiler) -> GuideSandbox:
    guides.new_matcher(Guide(regex="first"))
    assert guides._tools is not None
    return guides._tools[2]


@pytest.fixture(scope="module")
def guides() -> GuideCompiler:
    return new_compiler()


@pytest.fixture(scope="module")
def trial(guides: GuideCompiler) -> GuideSandbox:
    return compiled(guides)


def worker(trial: GuideSandbox, lane: int = 0) -> int:
    """Return the process of a lane."""
    link = trial._workers[lane]._end
    assert link is not None
    found = link.peek()
    assert found is not None
    pid: int = found[2][0].pid
    return pid


@pytest.mark.parametrize("guide", CRASHES, ids=str)
def test_a_crash_of_the_compiler_is_a_refusal(trial: GuideSandbox, guide: Guide) -> None:
    before = worker(trial)
    with pytest.raises(BadArgument, match="cannot be compiled: the compiler crashed on it"):
        trial.validate(guide)
    trial.validate(Guide(choice=("yes", str(guide.json_schema))))
    assert worker(trial) == before


@pytest.mark.parametrize("guide", HEAVY, ids=lambda guide: str(guide)[:60])
def test_what_takes_too_much_is_refused(guides: GuideCompiler, guide: Guide) -> None:
    with pytest.raises(BadArgument, match=r"more than (0\.3 s of processor|128 MB of memory)"):
        guides.new_matcher(guide)
    assert allows(guides, Guide(regex="[ab]c"), "bc")


def test_memory_is_limited_by_itself() -> None:
    trial = compiled(new_compiler(cpu_seconds=60.0, memory_mb=64))
    with pytest.raises(BadArgument, match=r"more than 64 MB of memory .*guide_memory_mb"):
        trial.validate(HEAVY[2])


def test_time_is_limited_by_itself() -> None:
    trial = compiled(new_compiler(cpu_seconds=0.3, memory_mb=1 << 14))
    for guide in HEAVY:
        with pytest.raises(BadArgument, match=r"more than 0\.3 s of processor time to compile"):
            trial.validate(guide)


def test_a_token_that_takes_long_is_found() -> None:
    """It compiles in time, and would hold up a step of the engine."""
    trial = compiled(new_compiler(cpu_seconds=3.0, memory_mb=2000))
    with pytest.raises(BadArgument, match=r"or a tenth of it for a token \(guide_cpu_seconds\)"):
        trial.validate(Guide(regex="a?" * 12_000))


def test_hostile_schemas_harm_nobody(device: str) -> None:
    pattern = {"type": "string", "pattern": "a?" * 30_000}
    hard = [pattern, integer(multipleOf=1 << 24), integer(minimum=10**300)]
    params = [SamplingParams(guide=Guide(json_schema=each)) for each in hard]
    llm = engine(device, guide_cpu_seconds=0.3)
    outputs = together(llm, [[1]] * 4, [*params, FREE])
    assert "the constraint cannot be compiled" in str(outputs[0].error)
    assert "to compile" in str(outputs[1].error)
    assert "are exact" in str(outputs[2].error)
    assert outputs[3].token_ids == one(engine(device), [1], FREE).token_ids


@pytest.mark.parametrize("schema", INEXACT, ids=str)
def test_numbers_that_would_not_be_exact_are_refused(
    guides: GuideCompiler, schema: dict[str, Any]
) -> None:
    tool = Function(name="f", parameters={"type": "object", "properties": {"x": schema}})
    for guide in (
        Guide(json_schema=schema),
        Guide(grammar=f'start: "a" %json {json.dumps(schema)}'),
        call_guide([tool], required=False),
    ):
        with pytest.raises(BadArgument, match=f"beyond {SAFE} .* up to which numbers are exact"):
            guides.new_matcher(guide)


@pytest.mark.parametrize("schema", EXACT, ids=str)
def test_numbers_up_to_the_largest_exact_one_are_kept(
    guides: GuideCompiler, schema: dict[str, Any]
) -> None:
    guides.new_matcher(Guide(json_schema=schema))


def test_bounds_at_the_limit_are_exact(guides: GuideCompiler) -> None:
    both = Guide(json_schema=integer(minimum=-SAFE, maximum=SAFE))
    for number, within in ((SAFE, True), (-SAFE, True), (SAFE + 1, False), (-SAFE - 1, False)):
        assert allows(guides, both, str(number)) == within
    above = Guide(json_schema=integer(exclusiveMinimum=SAFE - 1))
    assert [allows(guides, above, str(SAFE + by)) for by in (-1, 0, 1)] == [False, True, True]


def test_drawn_guides_do_no_harm() -> None:
    ends = run(seed=1, guides=40)
    assert min(ends[end] for end in ("followed", "exact", "are exact", "processor time")) > 0


def test_a_refused_guide_is_not_tried_again(
    trial: GuideSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bytes] = []

    def run_trial(line: bytes) -> TrialResult:
        tried.append(line)
        return TrialResult(Outcome.CRASHED, "bad")

    monkeypatch.setattr(trial._workers[0], "run_trial", run_trial)
    monkeypatch.setattr(trial, "_results", type(trial._results)())
    monkeypatch.setattr(trial_module, "_MAX_CACHED_RESULTS", 2)
    for word in (*"aabca", "a"):
        with pytest.raises(BadArgument, match="bad"):
            trial.validate(Guide(regex=word))
    assert len(tried) == 4  # the first is forgotten when the third has come
    assert len(trial._results) == 2


def test_a_worker_that_was_killed_is_replaced(trial: GuideSandbox) -> None:
    trial.validate(Guide(regex="before"))
    before = worker(trial)
    os.kill(before, signal.SIGKILL)
    trial.validate(Guide(regex="after"))
    assert worker(trial) != before
    assert not Path(f"/proc/{before}").exists()


def test_a_worker_that_stands_still_is_replaced(
    trial: GuideSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.validate(Guide(regex="going"))
    before = worker(trial)
    os.kill(before, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(trial._workers[0], "_wall_s", 0.3)
        with pytest.raises(BadArgument, match=r"did not compile within 0\.3 s of wall-clock time"):
            trial.validate(Guide(regex="still"))
    trial.validate(Guide(regex="still"))  # which was not its fault
    assert worker(trial) != before


def test_the_worker_has_no_torch(trial: GuideSandbox) -> None:
    trial.validate(Guide(regex="loaded"))
    loaded = Path(f"/proc/{worker(trial)}/maps").read_text()
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


def test_the_worker_has_only_its_own_link(trial: GuideSandbox) -> None:
    """Sockets of a server stay open as long as any process has them."""
    with ThreadPoolExecutor(1):
        trial.validate(Guide(regex="links"))
        files = Path(f"/proc/{worker(trial)}/fd")
        sockets = [file for file in files.iterdir() if os.readlink(file).startswith("socket:")]
    assert len(sockets) == 1


def until_gone(pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the worker goes on"
        time.sleep(0.01)


def test_the_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
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
    until_gone(int(run_python(code)))


def test_the_worker_ends_with_its_trial() -> None:
    trial = compiled(new_compiler())
    pid = worker(trial)
    del trial
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()  # not even as a zombie


def test_it_starts_with_the_first_guide(device: str) -> None:
    llm = engine(device)
    one(llm, [1], FREE)
    assert llm.engine._guide_compiler._tools is None
    one(llm, [1], SamplingParams(guide=Guide(regex="a")))
    assert llm.engine._guide_compiler._tools is not None
    quick, slow = llm.engine._guide_compiler._tools[2]._workers
    assert quick._link is not None
    assert slow._link is None


def test_a_thread_of_a_trial_that_ends_early_is_a_crash() -> None:
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


def test_guides_that_take_long_delay_only_their_like(guides: GuideCompiler) -> None:
    trial = compiled(guides)
    numbers = integer(multipleOf=1 << 24)
    heavy = [
        Guide(json_schema={"type": "array", "items": numbers, "minItems": by + 1})
        for by in range(5)
    ]
    with ThreadPoolExecutor(4) as threads:
        with trial._workers[1]._lock:  # as if one were tried there
            waiting = [threads.submit(trial.validate, guide) for guide in heavy[:4]]
            end = time.monotonic() + PATIENCE
            while trial._slow_trials._value:
                assert time.monotonic() < end
                time.sleep(0.01)
            guides.new_matcher(Guide(regex="quick"))
            with pytest.raises(TooBusy, match="try again later") as busy:
                trial.validate(heavy[4])
        for each in waiting:
            with pytest.raises(BadArgument, match=r"processor time|memory"):
                each.result(PATIENCE)
    refused = to_api_error(busy.value)
    assert (refused.status, refused.headers) == (429, {"Retry-After": "1"})
    with pytest.raises(BadArgument):  # what was not tried is not remembered
        trial.validate(heavy[4])


def test_memory_of_grammars_is_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are kept have as much as one may take, and those of texts four times as much."""
    guides = new_compiler(memory_mb=128)
    compiled(guides)
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


def test_memory_of_a_grammar_is_measured(trial: GuideSandbox) -> None:
    large = {"enum": [f"word {number}" for number in range(3000)]}
    assert trial.validate(Guide(regex="small")) < trial.validate(Guide(json_schema=large)) < 128


@pytest.mark.parametrize(
    "wrong", [{"guide_cpu_seconds": 0}, {"guide_cpu_seconds": "2"}, {"guide_memory_mb": 1}]
)
def test_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        EngineConfig(**wrong)
