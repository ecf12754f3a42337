"""Every option of every endpoint, by both of OpenAI's clients, is what the engine means by it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import SamplingParams
from roseinfer.guided.guide import Guide
from roseinfer.server.schemas.choices import TokenTexts
from tests.server.answers import Answer, Choice, of_chats, of_completions, of_responses
from tests.server.clients import CLIENTS, Asking
from tests.server.served import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer import LLM
    from roseinfer.llm import RequestOutput
    from tests.server.served import Server

SAID = "Once upon a time"
PROMPT = f"user: {SAID}\nassistant:"
"""What the tiny model's template makes of it, so that all endpoints have the same prompt."""
SEED = 198
"""With it the model ends its text before the limit."""
LIMIT = 16
COUNTED = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Endpoint:
    method: str
    prompt: dict[str, Any]
    limit: str
    """The name of the option that says how many tokens a text may have."""
    read: Callable[[list[Any]], Answer]
    of_streams: dict[str, Any]
    """What a stream is asked for, so that it says how many tokens were used."""

    def ask(self, asking: Asking, server: Server, *, stream: bool, **options: Any) -> Answer:
        asked = {"model": MODEL, "seed": SEED, self.limit: LIMIT} | self.prompt | options
        if stream:
            asked |= {"stream": True} | self.of_streams
        return self.read(asking(server, self.method, **asked))


COMPLETIONS = Endpoint(
    "completions.create", {"prompt": PROMPT}, "max_tokens", of_completions, COUNTED
)
MESSAGES = [{"role": "user", "content": SAID}]
CHATS = Endpoint("chat.completions.create", {"messages": MESSAGES}, "max_tokens", of_chats, COUNTED)
RESPONSES = Endpoint("responses.create", {"input": SAID}, "max_output_tokens", of_responses, {})

SCHEMA = {
    "type": "object",
    "properties": {"old": {"type": "boolean"}},
    "required": ["old"],
    "additionalProperties": False,
}
NAMED_SCHEMA = {"name": "person", "schema": SCHEMA}
ANY_JSON = {"type": "json_object"}
Option = tuple[dict[str, Any], dict[str, Any]]
"""What is asked for, and what that is to the engine."""


def same(**options: Any) -> Option:
    return options, options


EVERYWHERE = [
    same(temperature=0),
    same(temperature=1.5),
    same(top_p=0.5),
    same(top_k=3),
    same(min_p=0.2),
    same(repetition_penalty=1.3),
    same(seed=-5),
    same(ignore_eos=True),
]
CHOICES: list[Option] = [
    same(n=3),
    same(presence_penalty=2),
    same(frequency_penalty=-1.5),
    ({"max_tokens": 9}, {"max_new_tokens": 9}),
    ({"stop": ")"}, {"stop": (")",)}),
    ({"stop": ["b", "2", "\n"]}, {"stop": ("b", "2", "\n")}),
]
OPTIONS: list[tuple[Endpoint, list[Option]]] = [
    (COMPLETIONS, EVERYWHERE),
    (COMPLETIONS, CHOICES),
    (
        COMPLETIONS,
        [
            same(echo=True),
            ({"logprobs": 0}, {"logprobs": True}),
            ({"logprobs": 3, "temperature": 0}, {"top_logprobs": 3, "temperature": 0}),
        ],
    ),
    (CHATS, EVERYWHERE),
    (CHATS, CHOICES),
    (
        CHATS,
        [
            same(logprobs=True),
            ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}),
            ({"max_completion_tokens": 9, "max_tokens": None}, {"max_new_tokens": 9}),
            ({"max_completion_tokens": 9, "max_tokens": 9}, {"max_new_tokens": 9}),
            ({"response_format": ANY_JSON}, {"guide": Guide(json_object=True)}),
            (
                {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}},
                {"guide": Guide(json_schema=SCHEMA)},
            ),
        ],
    ),
    (RESPONSES, EVERYWHERE),
    (
        RESPONSES,
        [
            ({"max_output_tokens": 9}, {"max_new_tokens": 9}),
            ({"text": {"format": ANY_JSON}}, {"guide": Guide(json_object=True)}),
            (
                {"text": {"format": {"type": "json_schema"} | NAMED_SCHEMA}},
                {"guide": Guide(json_schema=SCHEMA)},
            ),
        ],
    ),
]


def expected(llm: LLM, *, n: int = 1, echo: bool = False, **options: Any) -> Answer:
    """Generate without a server what these options ask one for."""
    given = {"temperature": 1.0, "seed": SEED, "max_new_tokens": LIMIT} | options
    params = [SamplingParams(**given | {"seed": given["seed"] + at}) for at in range(n)]
    outputs = llm.generate([PROMPT] * n, params)
    choices = [choice_of(output, TokenTexts(llm.tokenizer)) for output in outputs]
    for choice in choices:
        choice.text = PROMPT * echo + choice.text
    return Answer(choices, len(PROMPT), sum(len(output.token_ids) for output in outputs))


def choice_of(output: RequestOutput, texts: TokenTexts) -> Choice:
    choice = Choice(output.text or "", output.finish_reason)
    tops = output.top_logprobs or [[] for _ in output.token_ids]
    if output.logprobs is not None:
        for token, logprob, top in zip(output.token_ids, output.logprobs, tops, strict=True):
            likeliest = {texts[other][0]: value for other, value in top}
            choice.add_token(texts[token][0], logprob, likeliest)
    return choice


@pytest.fixture(scope="module")
def plain(alone: LLM) -> Answer:
    return expected(alone)


@pytest.mark.many_alike
@pytest.mark.parametrize(
    ("endpoint", "asked", "means"),
    [
        pytest.param(endpoint, *option, id=f"{endpoint.method}-{option[0]}")
        for endpoint, options in OPTIONS
        for option in options
    ],
)
def test_it_is_what_the_engine_means_by_it(
    server: Server,
    alone: LLM,
    plain: Answer,
    endpoint: Endpoint,
    asked: dict[str, Any],
    means: dict[str, Any],
) -> None:
    wanted = expected(alone, **means)
    assert wanted != plain, "nobody would see whether it was ignored"
    for asking, stream in product(CLIENTS, (False, True)):
        got = endpoint.ask(asking, server, stream=stream, **asked)
        assert got == wanted, (asking, stream)
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
