"""What is no answer of an engine is told in one sentence that names the method."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pytest_roseinfer import EngineAdapter, MixDivergence, Sampling, run_forks, run_mix
from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec
from pytest_roseinfer.capabilities.return_values import floats
from pytest_roseinfer.engines.run import MixRun
from tests.engine_capabilities.engines.drawing_engine import DrawingEngine
from tests.engine_capabilities.engines.small_mixes import asked, mix
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyForks
from tests.engines.test_engines import engines, failures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.project import Project

__all__ = ["engines"]

TELLING = Sampling(2, logprobs=True, top_logprobs=1, prompt_logprobs=True)
DRAWN = RequestMix((RequestSpec((1, 2), TELLING),), options={"batch": 1})
TOKENS = "return a list of tokens"
TRUTH = "return True or False"
HELD = 'return a text, which is "" if nothing is held'
STAGES = "return one of waiting, prefilling, decoding, preempted"
LOGITS = "return a list of numbers, one for each token, of which there are 8 or more"
LOGPROBS = "return a list of numbers, one for each token"
PAIRS = "return a list of pairs for each token, each of a token and its log-probability"
OF_PROMPT = "return a list of numbers, one for each token of the prompt, with None for the first"


def _what(adapter: type[EngineAdapter], requests: RequestMix) -> str:
    with pytest.raises(MixDivergence) as found:
        run_mix(adapter, requests)
    assert found.value.__cause__ is None
    assert str(found.value).startswith(f"{found.value.what}\n\na cache of ")
    return found.value.what


def _always(base: type[EngineAdapter], method: str, answer: object) -> type[EngineAdapter]:
    """Return an adapter with a method that always answers the same."""
    return type("Wrong", (base,), {method: lambda *_: answer})


class WrongTokens(ToyAdapter):
    """It is asked whether rounding could have changed its tokens, and how these are spelled."""

    def tokens(self, request: Any) -> list[int]:
        return [99] * len(request.tokens)


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("submit", None, "(prompt, sampling) returned None: return an object for the request"),
        ("tokens", None, f"(request) returned None: {TOKENS}"),
        ("tokens", torch.tensor([1]), f"(request) returned a tensor of shape [1]: {TOKENS}"),
        ("tokens", "12", f"(request) returned '12': {TOKENS}"),
        ("tokens", [1.0], f"(request) returned [1.0]: {TOKENS}"),
        ("tokens", iter([1]), f"(request) returned <list_iterator object at ...>: {TOKENS}"),
        ("tokens", np.array(3), f"(request) returned array(3): {TOKENS}"),
        ("is_finished", None, f"(request) returned None: {TRUTH}"),
        ("find_leaks", None, f"() returned None: {HELD}"),
        ("find_leaks", 0, f"() returned 0: {HELD}"),
        ("path_counts", None, "() returned None: return a mapping of names to how often each"),
        ("path_counts", {"together": "3"}, "() returned {'together': '3'}: return a mapping"),
        ("generate_alone", None, f"(prompt, sampling, mix) returned None: {TOKENS}"),
        ("stage", "running", f"(request) returned 'running': {STAGES}"),
        ("stage", None, f"(request) returned None: {STAGES}"),
        ("cached_tokens", None, "(request) returned None: return a number of tokens"),
        ("is_near_tie", None, f"(tokens, sampling, mix) returned None: {TRUTH}"),
    ],
)
def test_what_is_no_answer_is_told(method: str, answer: object, said: str) -> None:
    base = WrongTokens if method == "is_near_tie" else ToyAdapter
    wrong = _always(base, method, answer)
    expected, _, _ = f"{method}{said}".partition("...")
    assert _what(wrong, mix(asked(1, 2))).startswith(expected)


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("logits", None, f"(tokens, mix) returned None: {LOGITS}"),
        ("logits", torch.zeros(1, 8), f"(tokens, mix) returned a tensor of shape [1, 8]: {LOGITS}"),
        ("logits", [0.5], f"(tokens, mix) returned [0.5]: {LOGITS}"),
        ("logits", ["0"] * 8, f"(tokens, mix) returned {['0'] * 8}: {LOGITS}"),
        ("logprobs", None, f"(request) returned None: {LOGPROBS}"),
        ("logprobs", [None], f"(request) returned [None]: {LOGPROBS}"),
        ("top_logprobs", [{3: -0.5}], f"(request) returned [{{3: -0.5}}]: {PAIRS}"),
        ("top_logprobs", [[(3,)]], f"(request) returned [[(3,)]]: {PAIRS}"),
        ("prompt_logprobs", None, f"(request) returned None: {OF_PROMPT}"),
        ("prompt_logprobs", ["-1"], f"(request) returned ['-1']: {OF_PROMPT}"),
        ("pieces", "abc", "(request) returned 'abc': return a list of texts"),
        ("pieces", [b"a"], "(request) returned [b'a']: return a list of texts"),
        ("decode", b"a", "(tokens) returned b'a': return a text"),
    ],
)
def test_what_is_no_answer_of_an_engine_that_tells_more_is_told(
    method: str, answer: object, said: str
) -> None:
    assert _what(_always(DrawingEngine, method, answer), DRAWN) == f"{method}{said}"


def test_a_token_that_cannot_be_spelled_is_told() -> None:
    wrong = _always(WrongTokens, "spell", 5)
    assert _what(wrong, mix(asked(1))) == "spell(token) returned 5: return a text"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "returned None: return a list of tokens for each sampling"),
        ([1, 2], "returned [1, 2]: return a list of tokens for each sampling"),
        ([[1]], "returned [[1]]: return 2 lists of tokens, one for each sampling"),
    ],
)
def test_forks_that_are_none_are_told(answer: object, said: str) -> None:
    with pytest.raises(MixDivergence) as found:
        run_forks(_always(ToyForks, "fork", answer), mix(asked(1), asked(2)))
    assert found.value.what == f"fork(prompt, samplings) {said}"


class AsksItselfInAStep(ToyAdapter):
    def step(self) -> None:
        self.path_counts()
        super().step()

    def path_counts(self) -> Any:
        return None


def test_a_step_is_not_to_blame_for_an_answer() -> None:
    assert _what(AsksItselfInAStep, mix(asked(1))).startswith("path_counts() returned None")


def test_a_likeliest_token_that_is_none_is_told() -> None:
    class Tells(DrawingEngine):
        def top_logprobs(self, request: Any) -> Any:
            return [[(99, -0.5)] for _ in request.tokens]

    said = "request 0, token 0: top logprobs are of [99]; they must be of 1 different tokens"
    assert _what(Tells, DRAWN) == said


class AnswersInArrays(DrawingEngine):
    """What is as good as a list passes."""

    def tokens(self, request: Any) -> Any:
        return np.array(super().tokens(request), dtype=np.int32)

    def is_finished(self, request: Any) -> Any:
        return np.bool_(super().is_finished(request))

    def generate_alone(self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix) -> Any:
        return np.array(super().generate_alone(prompt, sampling, mix))

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        return torch.tensor(super().logits(tokens, mix), requires_grad=True)

    def logprobs(self, request: Any) -> Any:
        return torch.tensor(super().logprobs(request))

    def pieces(self, request: Any) -> Any:
        return (*super().pieces(request),)


def test_what_is_as_good_as_the_right_answer_passes() -> None:
    assert run_mix(AnswersInArrays, DRAWN) == {}
    assert floats(torch.tensor([0.5, 2.0], dtype=torch.bfloat16)).tolist() == [0.5, 2.0]
    assert floats([torch.tensor(0.5)]).tolist() == [0.5]


def test_an_adapter_that_is_watched_does_not_hold_itself() -> None:
    run = MixRun(ToyAdapter, mix(asked(1)))
    gone = weakref.ref(run.adapter)
    del run
    assert gone() is None


WRONG = """
    from tests.engine_capabilities.engines.toy_engine import ToyAdapter
    from pytest_roseinfer import conformance

    class Wrong(ToyAdapter):
        def tokens(self, request):
            pass

    TestWrong = conformance(Wrong)
"""


@pytest.mark.usefixtures("engines")
def test_a_wrong_answer_is_told_without_frames_of_the_harness(project: Project) -> None:
    project.write(test_wrong=WRONG)
    shown = project.pytest("--roseinfer-seed=1", "--junitxml=results.xml").stdout.str()
    assert failures(project)["Wrong"] == f"tokens(request) returned None: {TOKENS}"
    assert "Traceback" not in shown
    assert "pytest_roseinfer/" not in shown
