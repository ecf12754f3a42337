"""Options of every endpoint, by both of OpenAI's clients, and their meaning for the engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import SamplingParams
from roseinfer.guided.guide import Guide
from roseinfer.server.schemas.choices import TokenTexts
from tests.server.answers import Answer, Choice, read_chats, read_completions, read_responses
from tests.server.clients import CLIENTS, Call
from tests.server.served import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer import LLM
    from roseinfer.llm import RequestOutput
    from tests.server.served import Server

MESSAGE = "Once upon a time"
PROMPT = f"user: {MESSAGE}\nassistant:"
"""The prompt that the tiny model's template makes of it, so that all endpoints share a prompt."""
SEED = 198
"""Seed with which the model ends its completion before the limit."""
LIMIT = 16
WITH_USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Endpoint:
    method: str
    prompt: dict[str, Any]
    limit: str
    """Name of the option that limits the tokens of a completion."""
    read: Callable[[list[Any]], Answer]
    stream_options: dict[str, Any]
    """Options of a stream that make it report its usage."""

    def send(self, call_api: Call, server: Server, *, stream: bool, **options: Any) -> Answer:
        options = {"model": MODEL, "seed": SEED, self.limit: LIMIT} | self.prompt | options
        if stream:
            options |= {"stream": True} | self.stream_options
        return self.read(call_api(server, self.method, **options))


COMPLETIONS = Endpoint(
    "completions.create", {"prompt": PROMPT}, "max_tokens", read_completions, WITH_USAGE
)
MESSAGES = [{"role": "user", "content": MESSAGE}]
CHATS = Endpoint(
    "chat.completions.create", {"messages": MESSAGES}, "max_tokens", read_chats, WITH_USAGE
)
RESPONSES = Endpoint(
    "responses.create", {"input": MESSAGE}, "max_output_tokens", read_responses, {}
)

SCHEMA = {
    "type": "object",
    "properties": {"old": {"type": "boolean"}},
    "required": ["old"],
    "additionalProperties": False,
}
NAMED_SCHEMA = {"name": "person", "schema": SCHEMA}
ANY_JSON = {"type": "json_object"}
Option = tuple[dict[str, Any], dict[str, Any]]
"""Options of the API, and their meaning as options of the engine."""


def same_option(**options: Any) -> Option:
    return options, options


EVERYWHERE = [
    same_option(temperature=0),
    same_option(temperature=1.5),
    same_option(top_p=0.5),
    same_option(top_k=3),
    same_option(min_p=0.2),
    same_option(repetition_penalty=1.3),
    same_option(seed=-5),
    same_option(ignore_eos=True),
]
CHOICES: list[Option] = [
    same_option(n=3),
    same_option(presence_penalty=2),
    same_option(frequency_penalty=-1.5),
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
            same_option(echo=True),
            ({"logprobs": 0}, {"logprobs": True}),
            ({"logprobs": 3, "temperature": 0}, {"top_logprobs": 3, "temperature": 0}),
        ],
    ),
    (CHATS, EVERYWHERE),
    (CHATS, CHOICES),
    (
        CHATS,
        [
            same_option(logprobs=True),
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
    """Generate the expected response for options of the engine, without a server."""
    params_of_choice = {"temperature": 1.0, "seed": SEED, "max_new_tokens": LIMIT} | options
    params = [
        SamplingParams(**params_of_choice | {"seed": params_of_choice["seed"] + at})
        for at in range(n)
    ]
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
            top_logprobs = {texts[other][0]: value for other, value in top}
            choice.add_token(texts[token][0], logprob, top_logprobs)
    return choice


@pytest.fixture(scope="module")
def plain(alone: LLM) -> Answer:
    return expected(alone)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("endpoint", "options", "engine_options"),
    [
        pytest.param(endpoint, *option, id=f"{endpoint.method}-{option[0]}")
        for endpoint, options in OPTIONS
        for option in options
    ],
)
def test_option_has_its_meaning_for_the_engine(
    server: Server,
    alone: LLM,
    plain: Answer,
    endpoint: Endpoint,
    options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    expected_answer = expected(alone, **engine_options)
    assert expected_answer != plain, "expected the option to change the response"
    for call_api, stream in product(CLIENTS, (False, True)):
        answer = endpoint.send(call_api, server, stream=stream, **options)
        assert answer == expected_answer, (call_api, stream)
        assert answer.logprobs == pytest.approx(expected_answer.logprobs, abs=1e-4)
