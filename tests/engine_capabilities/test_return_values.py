"""Return values of the wrong type fail in one sentence that names the method."""

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
from tests.engine_capabilities.engines.small_mixes import mix, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyForks
from tests.engines.test_engines import engines, failures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.project import Project

__all__ = ["engines"]

WITH_LOGPROBS = Sampling(2, logprobs=True, top_logprobs=1, prompt_logprobs=True)
LOGPROBS_MIX = RequestMix((RequestSpec((1, 2), WITH_LOGPROBS),), options={"batch": 1})
TOKENS = "return a list of tokens"
BOOLEAN = "return True or False"
LEAKS = 'return a text, which is "" if nothing is held'
STAGES = "return one of waiting, prefilling, decoding, preempted"
LOGITS = "return a list of numbers, one for each token, of which there are 8 or more"
LOGPROBS = "return a list of numbers, one for each token"
PAIRS = "return a list of pairs for each token, each of a token and its log-probability"
PROMPT_LOGPROBS = (
    "return a list of numbers, one for each token of the prompt, with None for the first"
)


def _failure(adapter: type[EngineAdapter], requests: RequestMix) -> str:
    with pytest.raises(MixDivergence) as failure:
        run_mix(adapter, requests)
    assert failure.value.__cause__ is None
    assert str(failure.value).startswith(f"{failure.value.summary}\n\na cache of ")
    return failure.value.summary


def _returning(base: type[EngineAdapter], method: str, value: object) -> type[EngineAdapter]:
    """Return an adapter with a method that always returns the same value."""
    return type("Wrong", (base,), {method: lambda *_: value})


class WrongTokens(ToyAdapter):
    """Returns wrong tokens, so that ``is_near_tie`` and ``spell`` are called."""

    def tokens(self, request: Any) -> list[int]:
        return [99] * len(request.tokens)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("submit", None, "(prompt, sampling) returned None: return an object for the request"),
        ("tokens", None, f"(request) returned None: {TOKENS}"),
        ("tokens", torch.tensor([1]), f"(request) returned a tensor of shape [1]: {TOKENS}"),
        ("tokens", "12", f"(request) returned '12': {TOKENS}"),
        ("tokens", [1.0], f"(request) returned [1.0]: {TOKENS}"),
        ("tokens", iter([1]), f"(request) returned <list_iterator object at ...>: {TOKENS}"),
        ("tokens", np.array(3), f"(request) returned array(3): {TOKENS}"),
        ("is_finished", None, f"(request) returned None: {BOOLEAN}"),
        ("find_leaks", None, f"() returned None: {LEAKS}"),
        ("find_leaks", 0, f"() returned 0: {LEAKS}"),
        ("path_counts", None, "() returned None: return a mapping of names to how often each"),
        ("path_counts", {"together": "3"}, "() returned {'together': '3'}: return a mapping"),
        ("generate_alone", None, f"(prompt, sampling, mix) returned None: {TOKENS}"),
        ("stage", "running", f"(request) returned 'running': {STAGES}"),
        ("stage", None, f"(request) returned None: {STAGES}"),
        ("cached_tokens", None, "(request) returned None: return a number of tokens"),
        ("is_near_tie", None, f"(tokens, sampling, mix) returned None: {BOOLEAN}"),
    ],
)
def test_wrong_return_value_fails_with_its_rule(method: str, value: object, message: str) -> None:
    base = WrongTokens if method == "is_near_tie" else ToyAdapter
    adapter = _returning(base, method, value)
    expected, _, _ = f"{method}{message}".partition("...")
    assert _failure(adapter, mix(request_spec(1, 2))).startswith(expected)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("logits", None, f"(tokens, mix) returned None: {LOGITS}"),
        ("logits", torch.zeros(1, 8), f"(tokens, mix) returned a tensor of shape [1, 8]: {LOGITS}"),
        ("logits", [0.5], f"(tokens, mix) returned [0.5]: {LOGITS}"),
        ("logits", ["0"] * 8, f"(tokens, mix) returned {['0'] * 8}: {LOGITS}"),
        ("logprobs", None, f"(request) returned None: {LOGPROBS}"),
        ("logprobs", [None], f"(request) returned [None]: {LOGPROBS}"),
        ("top_logprobs", [{3: -0.5}], f"(request) returned [{{3: -0.5}}]: {PAIRS}"),
        ("top_logprobs", [[(3,)]], f"(request) returned [[(3,)]]: {PAIRS}"),
        ("prompt_logprobs", None, f"(request) returned None: {PROMPT_LOGPROBS}"),
        ("prompt_logprobs", ["-1"], f"(request) returned ['-1']: {PROMPT_LOGPROBS}"),
        ("pieces", "abc", "(request) returned 'abc': return a list of texts"),
        ("pieces", [b"a"], "(request) returned [b'a']: return a list of texts"),
        ("decode", b"a", "(tokens) returned b'a': return a text"),
    ],
)
def test_wrong_return_value_of_an_optional_method_fails_with_its_rule(
    method: str, value: object, message: str
) -> None:
    assert _failure(_returning(DrawingEngine, method, value), LOGPROBS_MIX) == f"{method}{message}"


def test_wrong_return_value_of_spell_fails() -> None:
    adapter = _returning(WrongTokens, "spell", 5)
    assert _failure(adapter, mix(request_spec(1))) == "spell(token) returned 5: return a text"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None: return a list of tokens for each sampling"),
        ([1, 2], "returned [1, 2]: return a list of tokens for each sampling"),
        ([[1]], "returned [[1]]: return 2 lists of tokens, one for each sampling"),
    ],
)
def test_wrong_return_value_of_fork_fails(value: object, message: str) -> None:
    with pytest.raises(MixDivergence) as failure:
        run_forks(_returning(ToyForks, "fork", value), mix(request_spec(1), request_spec(2)))
    assert failure.value.summary == f"fork(prompt, samplings) {message}"


class CallsItsCountsInAStep(ToyAdapter):
    def step(self) -> None:
        self.path_counts()
        super().step()

    def path_counts(self) -> Any:
        return None


def test_wrong_value_returned_within_a_step_names_its_method() -> None:
    assert _failure(CallsItsCountsInAStep, mix(request_spec(1))).startswith(
        "path_counts() returned None"
    )


def test_unknown_token_in_top_logprobs_fails() -> None:
    class ReturnsAnUnknownToken(DrawingEngine):
        def top_logprobs(self, request: Any) -> Any:
            return [[(99, -0.5)] for _ in request.tokens]

    message = "request 0, token 0: top logprobs are of [99]; they must be of 1 different tokens"
    assert _failure(ReturnsAnUnknownToken, LOGPROBS_MIX) == message


class ReturnsArrays(DrawingEngine):
    """Returns arrays and tensors in place of lists."""

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


def test_equivalent_return_values_are_converted() -> None:
    assert run_mix(ReturnsArrays, LOGPROBS_MIX) == {"ended_by_length_later": 1}
    assert floats(torch.tensor([0.5, 2.0], dtype=torch.bfloat16)).tolist() == [0.5, 2.0]
    assert floats([torch.tensor(0.5)]).tolist() == [0.5]


def test_finished_mix_run_releases_its_adapter() -> None:
    run = MixRun(ToyAdapter, mix(request_spec(1)))
    reference = weakref.ref(run.adapter)
    del run
    assert reference() is None


WRONG = """
    from tests.engine_capabilities.engines.toy_engine import ToyAdapter
    from pytest_roseinfer import conformance

    class Wrong(ToyAdapter):
        def tokens(self, request):
            pass

    TestWrong = conformance(Wrong)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("engines")
def test_wrong_return_value_is_reported_without_frames_of_the_harness(project: Project) -> None:
    project.write(test_wrong=WRONG)
    output = project.pytest("--roseinfer-seed=1", "--junitxml=results.xml").stdout.str()
    assert failures(project)["Wrong"] == f"tokens(request) returned None: {TOKENS}"
    assert "Traceback" not in output
    assert "pytest_roseinfer/" not in output
