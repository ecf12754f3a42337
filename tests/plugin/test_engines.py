"""Whole engines under test: one that is right passes, each that is not is told what it does."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar
from xml.etree import ElementTree

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pytest_roseinfer import (
    Asked,
    EngineAdapter,
    FastPath,
    MixDivergence,
    RequestMix,
    Sampling,
    conformance,
    run_forks,
    run_mix,
)
from pytest_roseinfer.engines.strategies import (
    BLOCK_SIZES,
    common_text,
    prompts,
    request_mixes,
    samplings,
)
from tests.plugin.engines.broken_engines import (
    ANeighboursTokenLeaksIn,
    CountsAnUndeclaredPath,
    EndsOthersWithTheCancelled,
    ForksKeepALease,
    ForksShareTheirDraws,
    GeneratesOneTokenMore,
    IgnoresCancel,
    KeepsALease,
    LetsSomebodyWaitForever,
    LosesTheLastToken,
    Misrounds,
    NeverGuesses,
    RaisesInAStep,
    RefusesWhatFits,
    TakesAnothersPrefix,
)
from tests.plugin.engines.toy_engine import ToyAdapter, ToyEngine, ToyForks
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.plugin.conftest import Project
    from tests.plugin.engines.toy_engine import ToyRequest

FEW = ("--roseinfer-examples=60", "--roseinfer-seed=1")
WRONG_TOKEN = r"request \d, token \d: \d+; alone it gets \d+"
REASONS = {
    ANeighboursTokenLeaksIn: WRONG_TOKEN,
    TakesAnothersPrefix: WRONG_TOKEN,
    LosesTheLastToken: r"request \d ended after \d+ tokens; alone it gets \d+",
    GeneratesOneTokenMore: r"request \d, token \d: \d+; alone it has ended by then",
    IgnoresCancel: r"request \d was cancelled and goes on",
    EndsOthersWithTheCancelled: r"request \d ended after \d+ tokens; alone it gets \d+",
    LetsSomebodyWaitForever: r"requests \[\d(, \d)*\] have not ended after \d+ steps",
    RaisesInAStep: "a step raised IndexError: no row 2",
    RefusesWhatFits: r"request \d was refused: ValueError: too long",
    KeepsALease: r"every request has ended, and the engine still holds -?\d+ leases",
    CountsAnUndeclaredPath: "path 'shortcut' ran and is not declared",
    ForksShareTheirDraws: r"fork [1-9] of request 0's prompt got \[.*\]; alone it gets \[.*\]",
    ForksKeepALease: "every fork was released, and left are 1 leases",
}
USUAL = {"batch_size": 2, "prefixes": False}
GREEDY = Sampling(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def _keep_the_kernel_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """``conformance()`` chooses one for the process; that of these tests has others to run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def engines(project: Project) -> Project:
    """A project that imports the engines from where they are."""
    project.monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return project


def file_testing(*adapters: type[EngineAdapter]) -> str:
    """A test file."""
    imports = [f"from {each.__module__} import {each.__name__}" for each in adapters]
    classes = [f"Test{each.__name__} = conformance({each.__name__})" for each in adapters]
    return "\n".join(["from pytest_roseinfer import conformance", *imports, *classes])


def failures(project: Project) -> dict[str, str]:
    """What each failed test says, by the name of the adapter."""
    cases = ElementTree.parse(project.path / "results.xml").iter("testcase")
    return {
        case.attrib["classname"].rpartition(".Test")[2]: failure.attrib["message"]
        for case in cases
        for failure in case.iter("failure")
    }


def mix(*requests: Asked, room: int = 64, **options: Any) -> RequestMix:
    return RequestMix(requests, cache_tokens=room, options={**USUAL, **options})


def asked(*prompt: int, sampling: Sampling = GREEDY, **fields: int) -> Asked:
    return Asked(prompt, sampling, **fields)


def reason(adapter: type[EngineAdapter], requests: RequestMix) -> str:
    """The first line of what is said against it."""
    with pytest.raises(MixDivergence) as caught:
        run_mix(adapter, requests)
    return str(caught.value).partition("\n")[0]


def test_an_engine_that_is_right_passes_on_all_its_paths(engines: Project) -> None:
    engines.write(test_toy=file_testing(ToyAdapter, ToyForks))
    result = engines.pytest("-W", "error", "-rs", *FEW)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=3, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*= roseinfer: tests.plugin.engines.toy_engine:ToyAdapter *=*",
            "48 histories *",
            "tested: make, submit, cancel, step, tokens, ended, leftovers, path_counts, alone",
            "not offered: forked, undecided",
            "path * together * by itself * equal",
            "path * from a prefix * from the start * equal",
            "condition * crowded * met",
            "*= roseinfer: tests.plugin.engines.toy_engine:ToyForks *=*",
            "57 histories *",
            "tested: *, alone, forked",
            "SKIPPED * ToyAdapter does not offer forked()",
        ]
    )


def test_each_that_is_not_is_rejected_for_what_it_does(engines: Project) -> None:
    engines.write(test_broken=file_testing(*REASONS, NeverGuesses))
    result = engines.pytest("--junitxml=results.xml", *FEW)
    found = failures(engines)
    unlike = {
        each.__name__: found.get(each.__name__)
        for each, said in REASONS.items()
        if not re.fullmatch(said, found.get(each.__name__, ""))
    }
    assert unlike == {}
    # What never happens cannot be wrong: no test fails, and the run does.
    assert "NeverGuesses" not in found
    result.stdout.fnmatch_lines(
        [
            "*broken_engines:NeverGuesses *=*",
            "path * guessed * by itself * 0 *NOT REACHED",
            "FAILED: path 'guessed' was never reached and must be 3 times: *",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def how_to() -> tuple[str, str]:
    """What docs/how-to.md says of engines: its example, and what follows that."""
    page = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    section = page.partition("**Test a whole engine.**")[2].partition("\n\n**")[0]
    code, after = section.partition("```python\n")[2].split("```")
    return code, after


def test_the_example_works_as_it_is_printed(project: Project, how_to: tuple[str, str]) -> None:
    project.write(test_my_engine=how_to[0])
    result = project.pytest("-W", "error", "--roseinfer-seed=1")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["80 histories *", "path * batch * single * equal"])


def test_the_example_fails_as_it_says(project: Project, how_to: tuple[str, str]) -> None:
    code, after = how_to
    broken, right, said = re.findall(r"`([^`]*)`", after)[:3]
    assert code.count(right) == 1
    project.write(test_my_engine=code.replace(right, broken))
    project.pytest(*FEW, "--junitxml=results.xml").assert_outcomes(failed=1, skipped=1)
    # The numbers are those of one of the smallest mixes.
    alike = re.sub(r"\d+", r"\\d+", " ".join(said.split()))
    assert re.fullmatch(alike, failures(project)["MyEngine"])


def test_it_says_what_an_adapter_lacks() -> None:
    class Lacking(EngineAdapter):
        def make(self, mix: RequestMix) -> None: ...

        def step(self) -> None: ...

    said = "Lacking must define submit, cancel, tokens, ended, leftovers, path_counts, alone"
    with pytest.raises(TypeError, match=said):
        conformance(Lacking)


def test_a_mix_that_goes_well_returns_the_paths_it_took() -> None:
    requests = mix(asked(1, 2), asked(1, 2, 3, arrives=9), asked(7, arrives=9), prefixes=True)
    assert run_mix(ToyAdapter, requests) == {
        "from the start": 2,
        "from a prefix": 1,
        "by itself": 4,
        "together": 4,
    }


def test_an_engine_is_stepped_before_and_between_its_requests() -> None:
    steps: list[int] = []

    class Watched(ToyAdapter):
        def step(self) -> None:
            super().step()
            steps.append(self.engine.counts["by itself"])

    run_mix(Watched, mix(asked(1, arrives=2), asked(1, arrives=8)))
    assert steps == [0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8]


def test_what_a_cancelled_request_got_before_must_be_right() -> None:
    leaving = asked(1, cancelled_after=1), asked(2, cancelled_after=3)
    assert run_mix(ToyAdapter, mix(*leaving))
    assert reason(Misrounds, mix(*leaving)).startswith("request 1, token 1: ")


def test_a_step_that_raised_is_to_blame() -> None:
    with pytest.raises(MixDivergence) as caught:
        run_mix(RaisesInAStep, mix(*[asked(1)] * 3, batch_size=3))
    assert isinstance(caught.value.__cause__, IndexError)


SHOWN = mix(
    asked(1, 2, sampling=Sampling(3, temperature=1.0, seed=2, repetition_penalty=1.5)),
    asked(3, sampling=GREEDY, arrives=1, cancelled_after=2),
    room=30,
)


def test_a_failure_tells_its_mix_in_words() -> None:
    with pytest.raises(MixDivergence) as caught:
        run_mix(LosesTheLastToken, SHOWN)
    assert str(caught.value).splitlines()[1:] == [
        "",
        "a cache of 30 tokens in blocks of 4, batch_size=2, prefixes=False",
        "  0. at step 0: 2 tokens [1, 2], up to 3 new, drawn at temperature 1.0 from seed 2, "
        "repetition penalty 1.5",
        "  1. at step 1: 1 tokens [3], up to 4 new, past the end of the text, cancelled 2 steps "
        "later",
    ]
    assert caught.value.mix is SHOWN


def test_a_mix_survives_being_saved() -> None:
    assert RequestMix.from_json(json.loads(json.dumps(SHOWN.to_json()))) == SHOWN


@pytest.mark.parametrize(
    ("adapter", "said"),
    [(LosesTheLastToken, "request "), (ForksShareTheirDraws, "fork ")],  # run_mix and run_forks
)
def test_a_failing_mix_is_said_once_and_runs_again_until_it_is_mended(
    engines: Project, adapter: type[EngineAdapter], said: str
) -> None:
    engines.write(test_it=file_testing(adapter))
    shown = engines.pytest(*FEW).stdout.str().partition("= FAILURES =")[2]
    (line,) = {line for line in shown.splitlines() if line.startswith(said)}
    assert shown.count(f"{line}\n\na cache of ") == 1
    for noise in ("Traceback", "Failing test case", "RequestMix(", "engines/run.py"):
        assert noise not in shown
    trace, script = engines.saved(".json"), engines.saved(".py")
    assert f"replay with: pytest --roseinfer-replay {trace}\n         or: python {script}" in shown
    broken = engines.pytest("--roseinfer-replay", str(trace))
    assert (broken.ret, broken.stdout.str().count(line)) == (pytest.ExitCode.TESTS_FAILED, 1)
    assert f"MixDivergence: {line}\n" in engines.run_script().stderr

    right = ToyForks if adapter.defines("forked") else ToyAdapter
    for file in (trace, script):
        old, new = (f"{each.__module__}:{each.__qualname__}" for each in (adapter, right))
        text = file.read_text().replace("broken_engines.py", "toy_engine.py")
        file.write_text(text.replace(old, new))
    assert engines.pytest("--roseinfer-replay", str(trace)).ret == pytest.ExitCode.OK
    mended = engines.run_script()
    assert (mended.stdout, mended.stderr) == ("it ran through: nothing differed\n", "")


def test_forks_get_a_cache_that_has_room_for_all() -> None:
    rooms: list[int] = []

    class Watched(ToyForks):
        def make(self, mix: RequestMix) -> None:
            rooms.append(mix.cache_tokens)
            super().make(mix)

    first, second = asked(1, 2, 3), asked(9, sampling=replace(GREEDY, max_new_tokens=7))
    assert run_forks(Watched, mix(first, second, room=5)) == {"from the start": 1}
    assert rooms == [2 * (3 + 7 + 4)]


Question = tuple[tuple[int, ...], Sampling]


class Undecided(Misrounds):
    """Rounding excuses whatever begins like the first request."""

    questions: ClassVar[list[Question]]

    def undecided(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        assert mix.size
        self.questions.append((tuple(tokens), sampling))
        return tokens[0] == 1


@pytest.fixture
def questions() -> list[Question]:
    Undecided.questions = []
    return Undecided.questions


def first_tokens(*prompt: int) -> tuple[int, ...]:
    """A prompt, and what is right to follow."""
    (token,) = ToyAdapter().alone(prompt, Sampling(1), mix())
    return (*prompt, token)


@pytest.mark.parametrize("check", [run_mix, run_forks])
def test_undecided_is_asked_once_where_tokens_differ(
    check: Callable[[type[EngineAdapter], RequestMix], object], questions: list[Question]
) -> None:
    """By then the first token was found right, and the third and fourth have not been."""
    check(Undecided, mix(asked(1, 2)))
    assert questions == [(first_tokens(1, 2), GREEDY)]


@pytest.mark.parametrize("check", [run_mix, run_forks])
def test_undecided_is_not_asked_where_nothing_differs(
    check: Callable[[type[EngineAdapter], RequestMix], object], questions: list[Question]
) -> None:
    class Right(Undecided):
        engine_type = ToyEngine

    assert check(Right, mix(asked(1, 2), asked(4, 2)))
    assert questions == []


def test_undecided_excuses_nobody_else(questions: list[Question]) -> None:
    said = reason(Undecided, mix(asked(1, 2), asked(4, 2)))
    assert said.startswith("request 1, token 1: ")
    assert [tokens[0] for tokens, _ in questions] == [1, 4]


def test_undecided_excuses_only_what_follows(questions: list[Question]) -> None:
    """Not the token before, nor what is held at the end."""

    class WrongFromTheStart(ToyEngine):
        def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
            return [token ^ 1 for token in super().choose(batch)]

    class FromTheSecondOn(Undecided):
        engine_type = WrongFromTheStart

        def undecided(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
            return super().undecided(tokens, sampling, mix) and len(tokens) > 2

    assert reason(FromTheSecondOn, mix(asked(1, 2))).startswith("request 0, token 0: ")
    assert questions == [((1, 2), GREEDY)]

    class Leftover(Undecided):
        def leftovers(self) -> str:
            return "a block"

    said = reason(Leftover, mix(asked(1, 2)))
    assert said == "every request has ended, and the engine still holds a block"


def test_a_request_that_is_over_at_once_is_compared_too() -> None:
    class Closed(ToyAdapter):
        def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
            request = super().submit(prompt, sampling)
            self.engine.cancel(request)
            return request

    assert reason(Closed, mix(asked(1))) == "request 0 ended after 0 tokens; alone it gets 4"


def test_requests_that_end_with_a_cancelled_one_are_compared_too() -> None:
    both = mix(asked(1, cancelled_after=2), asked(2))
    said = reason(EndsOthersWithTheCancelled, both)
    assert said == "request 1 ended after 2 tokens; alone it gets 4"


def test_a_token_that_was_right_must_stay_so() -> None:
    class Rewriting(ToyEngine):
        def take(self, request: ToyRequest, token: int) -> None:
            super().take(request, token)
            if len(request.tokens) == 3:
                request.tokens[0] ^= 1

    class Rewrites(ToyAdapter):
        engine_type = Rewriting

    assert reason(Rewrites, mix(asked(1))).startswith("request 0, token 0: ")


def test_a_request_that_was_cancelled_gets_nothing_more() -> None:
    class Deaf(ToyAdapter):
        """Says that it has ended what it goes on with."""

        def make(self, mix: RequestMix) -> None:
            super().make(mix)
            self.left: set[ToyRequest] = set()

        def cancel(self, request: ToyRequest) -> None:
            self.left.add(request)

        def ended(self, request: ToyRequest) -> bool:
            return request.over or request in self.left

    assert "request 0" in reason(Deaf, mix(asked(1, cancelled_after=1), asked(2)))


def test_a_path_that_its_switches_rule_out_must_not_be_counted() -> None:
    class Contradicting(ToyAdapter):
        paths: ClassVar[Mapping[str, FastPath]] = {
            **ToyAdapter.paths,
            "together": FastPath(equals="by itself", never_with=[{"batch_size": 2}]),
        }

    assert "'together'" in reason(Contradicting, mix(asked(1), asked(2)))


def test_it_says_what_a_path_lacks() -> None:
    mine = type("Mine", (ToyAdapter,), {"paths": {"fast": "slow"}})
    with pytest.raises(TypeError, match=re.escape("Mine.paths['fast'] is 'slow'")):
        conformance(mine)


def test_forks_take_declared_paths_only() -> None:
    class Undeclared(ToyForks):
        paths: ClassVar[Mapping[str, FastPath]] = {}

    with pytest.raises(MixDivergence, match="path 'from the start' ran and is not declared"):
        run_forks(Undeclared, mix(asked(1)))


def test_the_last_step_counts() -> None:
    class Late(ToyAdapter):
        def make(self, mix: RequestMix) -> None:
            super().make(mix)
            self.steps = 0

        def step(self) -> None:
            self.steps += 1
            if self.steps == 22:  # one for each of two tokens, and twenty
                super().step()

    assert run_mix(Late, mix(asked(1, sampling=Sampling(1)))) == {
        "from the start": 1,
        "by itself": 1,
    }


class SmallAdapter(ToyAdapter):
    vocabulary = 3
    most_tokens = 7


@pytest.mark.parametrize("adapter", [ToyAdapter, SmallAdapter])
@pytest.mark.parametrize("most_steps", [1, 12])
def test_mixes_are_what_adapters_are_promised(
    adapter: type[EngineAdapter], most_steps: int
) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(request_mixes(adapter, most_steps=most_steps, device="cuda:1"))
    def check(drawn: RequestMix) -> None:
        assert drawn.device == "cuda:1"
        assert drawn.block_size in BLOCK_SIZES
        assert drawn.options.keys() == adapter.option_choices.keys()
        for name, value in drawn.options.items():
            assert value in adapter.option_choices[name]
        arrivals = [each.arrives for each in drawn.requests]
        assert arrivals == sorted(arrivals)
        assert 0 < len(arrivals) == drawn.size <= 6
        for each in drawn.requests:
            assert each.prompt
            assert all(0 <= token < adapter.vocabulary for token in each.prompt)
            most = len(each.prompt) + each.sampling.max_new_tokens
            assert most <= min(adapter.most_tokens, drawn.cache_tokens)
            assert 1 <= each.sampling.max_new_tokens <= most_steps
            assert each.cancelled_after is None or each.cancelled_after >= 0

    check()


@given(request_mixes(ToyAdapter, aim="from a prefix"))
@settings(max_examples=30, deadline=None, database=None)
def test_an_aim_sets_the_switches_its_path_needs(drawn: RequestMix) -> None:
    assert drawn.options["prefixes"] is True


@pytest.mark.parametrize(
    "wanted",
    [
        lambda drawn: drawn.cache_tokens == max(sizes(drawn)) < sum(sizes(drawn)) / 3,
        lambda drawn: drawn.cache_tokens >= sum(sizes(drawn)) and drawn.size > 2,
        lambda drawn: any(
            len(a.prompt) > 8 and a.prompt[:8] == b.prompt[:8] and a.prompt != b.prompt
            for a in drawn.requests
            for b in drawn.requests
        ),
        lambda drawn: any(each.cancelled_after == 0 for each in drawn.requests),
        lambda drawn: drawn.requests[-1].arrives > 5,
        lambda drawn: all(each.sampling.temperature for each in drawn.requests),
    ],
    ids=["crowded", "roomy", "sharing a prefix", "cancelled at once", "late", "drawn"],
)
def test_mixes_are_of_every_kind(wanted: Callable[[RequestMix], bool]) -> None:
    """Else ``find`` raises."""
    find(
        request_mixes(ToyAdapter),
        wanted,
        settings=settings(max_examples=500, database=None, phases=[Phase.generate]),
        random=Random(1),
    )


def sizes(drawn: RequestMix) -> list[int]:
    return [len(each.prompt) + each.sampling.max_new_tokens for each in drawn.requests]


@given(prompts(vocabulary=7, longest=9), samplings(most=4), st.integers(0, 20))
@settings(max_examples=60, deadline=None, database=None)
def test_prompts_and_samplings_are_useful_alone(
    prompt: tuple[int, ...], sampling: Sampling, length: int
) -> None:
    assert 1 <= len(prompt) <= 9
    assert set(prompt) <= set(range(7))
    # The first token may be another one.
    agreeing = [at for at in range(1, len(prompt)) if prompt[1:at] == text(7, 9)[1:at]]
    assert len(prompt) - max(agreeing, default=1) <= 2
    assert 1 <= sampling.max_new_tokens <= 4
    assert text(7, length) == text(7, 20)[:length]


def text(vocabulary: int, length: int) -> tuple[int, ...]:
    return common_text(length, vocabulary)
