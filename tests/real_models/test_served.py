"""Server of SmolLM2: chats by its template, functions, schemas, prefix cache, and the harness."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real_models.real_model import RealModel
    from tests.server.served import Server

pytestmark = pytest.mark.xdist_group("smollm2")

_NAME = "smollm2"
_SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
_CHATS: list[list[Any]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [_SYSTEM, {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Schreibe einen Satz über Rosen 🌹."}],
    [
        _SYSTEM,
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
]
_WITH_FUNCTIONS = """\
{% if tools %}<|im_start|>system
You have these functions: {{ tools | tojson }}
Call one by JSON, as in {"name": "f", "arguments": {"x": "y"}}.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Template with functions, which that of SmolLM2 does not have."""
_WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@contextmanager
def _served(model: RealModel, **options: Any) -> Iterator[Server]:
    config = {"served_model_name": (_NAME,)}
    engine = {"model": model.copy(), "tokenizer": model.tokenizer, "block_size": 16}
    with running(config=config, **engine, **options) as server:
        yield server


def _chat(server: Server, messages: list[Any], **options: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 40} | options
    return server.client().chat.completions.create(model=_NAME, messages=messages, **settings)


@pytest.mark.slow
def test_chats_by_the_model_template(smollm2: RealModel) -> None:
    """Answers, sent at once, are greedy by transformers for the prompt that its template gives."""
    with _served(smollm2) as server, ThreadPoolExecutor() as threads:
        answers = [*threads.map(lambda messages: _chat(server, messages), _CHATS)]
        for messages, answer in zip(_CHATS, answers, strict=True):
            (choice,) = answer.choices
            streamed = _chat(server, messages, stream=True)
            assert choice.message.content == "".join(
                each.choices[0].delta.content or "" for each in streamed
            )
            prompt = smollm2.chat(messages)
            assert answer.usage.prompt_tokens == len(prompt)
            new = smollm2.tokenizer(choice.message.content).input_ids
            if choice.finish_reason == "stop":
                new.append(smollm2.tokenizer.eos_token_id)
            assert answer.usage.completion_tokens == len(new)
            smollm2.check_greedy(prompt, new)
    assert "Paris" in answers[0].choices[0].message.content
    assert "Ada" in answers[3].choices[0].message.content


@pytest.mark.slow
def test_functions_and_schemas_are_followed(smollm2: RealModel) -> None:
    """The model does not only obey the grammar: the values are those of the text."""
    with _served(smollm2, chat_template=_WITH_FUNCTIONS) as server:
        question = {"role": "user", "content": "What is the weather in Paris, in celsius?"}
        answer = _chat(server, [question], tools=[_WEATHER], tool_choice="required")
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "celsius"}
        schema = {"name": "person", "schema": _PERSON, "strict": True}
        answer = _chat(
            server,
            [{"role": "user", "content": "As JSON: Ada is 36 years old and lives in London."}],
            response_format={"type": "json_schema", "json_schema": schema},
        )
        assert json.loads(answer.choices[0].message.content) == {"name": "Ada", "age": 36}


@pytest.mark.slow
def test_chats_that_go_on_hit_the_prefix_cache(
    smollm2: RealModel, figure: Callable[[str], None]
) -> None:
    """Each turn reuses all tokens that it has in common with the previous turn and its answer."""
    messages: list[Any] = [_SYSTEM]
    stored: list[int] = []
    cached, prompted = 0, 0
    with _served(smollm2) as server:
        for question in ("What is a rose?", "What colours does it have?", "Why?", "Thank you!"):
            messages.append({"role": "user", "content": question})
            prompt = smollm2.chat(messages)
            answer = _chat(server, messages)
            hit = answer.usage.prompt_tokens_details.cached_tokens
            pairs = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, stored, strict=False))
            assert hit == len([*pairs]), question
            content = answer.choices[0].message.content
            new = smollm2.tokenizer(content).input_ids
            assert new
            smollm2.check_greedy(prompt, new)
            stored = [*prompt, *new]
            if answer.choices[0].finish_reason == "length":
                stored.pop()  # the last token was never read
            cached, prompted = cached + hit, prompted + len(prompt)
            messages.append({"role": "assistant", "content": content})
    figure(f"a chat of 4 turns: {cached} of {prompted} prompt tokens from the prefix cache")


@pytest.mark.slow
def test_harness_finds_nothing_at_the_endpoint(
    smollm2: RealModel, pytester: pytest.Pytester, figure: Callable[[str], None]
) -> None:
    with _served(smollm2) as server:
        result = pytester.runpytest_subprocess(
            *("--pyargs", "pytest_roseinfer.suite", "-p", "no:cacheprovider"),
            *("--roseinfer-endpoint", server.url, "--roseinfer-model", _NAME),
            *("--roseinfer-examples=2", "--roseinfer-step-seconds=60"),
        )
    result.assert_outcomes(passed=1, skipped=2)
    (line,) = (each for each in result.outlines if " mixes of requests " in each)
    figure(line)
