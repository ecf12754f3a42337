"""What Python allocates in a step must not grow with the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pytest_roseinfer.gates.growth import measure_growth
from roseinfer import LLM, SamplingParams
from roseinfer.engine.engine import Engine
from roseinfer.text.completion_text import (
    CompletionText,
    StopStringMatcher,
    new_detokenizer_factory,
)
from roseinfer.text.detokenizer import WindowDetokenizer
from tests.models.families import VOCABULARY
from tests.text.tokenizers import byte_level, metaspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.gates.costs import Costs
    from roseinfer.engine.request import Request
    from roseinfer.text.detokenizer import IncrementalDetokenizer
    from tests.project import Project

SHORT, LONG = 50, 2050
_STEPS_TO_STEADY = 4
KINDS: dict[str, dict[str, Any]] = {
    "torch operations": {"paged_attention": False, "resident_decode": False},
    "resident": {"resident_decode": True, "run_ahead": 1},
}


def steady(device: str, **config: Any) -> tuple[Callable[[], object], Callable[[int], None]]:
    """Return a decode step, and a function that begins contexts of a length."""
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=LONG + 50
        )
    )
    sizes: dict[str, Any] = {"kv_cache_tokens": 3 * LONG, "block_size": 64, "prefix_cache": False}
    engine = LLM(model.to(device), device=device, **sizes, **config).engine
    running: list[Request] = []

    def begin(length: int) -> None:
        for request in running:
            engine.cancel(request)
        params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
        running[:] = [engine.submit([7 + row] * length, params) for row in range(2)]
        while not all(request.num_generated > _STEPS_TO_STEADY for request in running):
            engine.step()

    return engine.step, begin


@pytest.mark.parametrize("kind", KINDS)
def test_steps_allocate_no_more_in_long_contexts(
    roseinfer_costs: Costs, roseinfer_device: str, kind: str
) -> None:
    step, begin = steady(roseinfer_device, **KINDS[kind])
    roseinfer_costs.check_growth(
        "steady",
        step,
        shorten=lambda: begin(SHORT),
        lengthen=lambda: begin(LONG),
        added_tokens=LONG - SHORT,
    )


def test_copied_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add_token: Any = Engine._add_token

    def with_copy(self: Any, request: Request, *arguments: Any) -> Any:
        request.sequence.token_ids = [*request.sequence.token_ids]
        return add_token(self, request, *arguments)

    monkeypatch.setattr(Engine, "_add_token", with_copy)
    step, begin = steady("cpu", **KINDS["torch operations"])
    growth = measure_growth(step, lambda: begin(SHORT), lambda: begin(LONG), LONG - SHORT)
    assert growth.per_token >= 7
    assert "with_copy" in growth.describe()


WORDS = metaspace(["\u2581one", "two"])
DETOKENIZERS: dict[str, Callable[[], IncrementalDetokenizer]] = {
    "bytes": new_detokenizer_factory(byte_level([b" one", b" two"])),
    "decoder chain": new_detokenizer_factory(WORDS),
    "window": lambda: WindowDetokenizer(WORDS),
}


def growing_text(kind: str) -> tuple[Callable[[], object], Callable[[int], None]]:
    """Return a step that adds a token to a text, and a function that begins texts of a length."""
    text = CompletionText(DETOKENIZERS[kind], None)

    def begin(length: int) -> None:
        nonlocal text
        text = CompletionText(DETOKENIZERS[kind], StopStringMatcher(["one more", "never"]))
        for at in range(length):
            text.add(1 + at % 2)

    return lambda: text.add(2), begin


@pytest.mark.parametrize("kind", DETOKENIZERS)
def test_steps_allocate_no_more_for_long_texts(roseinfer_costs: Costs, kind: str) -> None:
    step, begin = growing_text(kind)
    roseinfer_costs.check_growth(
        "text",
        step,
        shorten=lambda: begin(SHORT),
        lengthen=lambda: begin(LONG),
        added_tokens=LONG - SHORT,
    )


@pytest.mark.parametrize("kind", DETOKENIZERS)
def test_copied_text_is_found(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    add: Any = CompletionText.add

    def with_copy(self: Any, token: int) -> Any:
        self.text_so_far  # noqa: B018
        return add(self, token)

    monkeypatch.setattr(CompletionText, "add", with_copy)
    step, begin = growing_text(kind)
    growth = measure_growth(step, lambda: begin(SHORT), lambda: begin(LONG), LONG - SHORT)
    assert growth.per_token >= 1


FAILING = """
    class Engine:
        def begin(self, length):
            self.tokens = list(range(length))

        def step(self):
            self.tokens = [*self.tokens, 7]


    def test_growth(roseinfer_costs):
        engine = Engine()
        roseinfer_costs.check_growth(
            "step",
            engine.step,
            shorten=lambda: engine.begin(10),
            lengthen=lambda: engine.begin(3010),
            added_tokens=ADDED,
        )
"""


def test_failure_names_the_bytes_and_the_function(project: Project) -> None:
    project.write(test_growth=FAILING.replace("ADDED", "3000"))
    result = project.pytest("test_growth.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "step does more work in longer contexts: Python allocates * bytes in a step, and * "
            "where each context is 3000 tokens shorter: *.* bytes more for each token, most of "
            "them in test_growth.Engine.step"
        ]
    )


def test_number_of_added_tokens_is_validated(project: Project) -> None:
    project.write(test_growth=FAILING.replace("ADDED", "0"))
    result = project.pytest("test_growth.py")
    result.stdout.fnmatch_lines(["*step: added_tokens=0: must be 1 or more"])
