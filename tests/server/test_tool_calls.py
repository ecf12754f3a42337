"""Parser of tool calls, fed with arbitrary pieces of text."""

from __future__ import annotations

import json
import random

import pytest

from roseinfer.guided.compiler import GuideCompiler
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.server.schemas.tools import Function, ToolCallParser, call_guide

ARGUMENTS = ['{"x": 1}', "{ }", '{"y": "}]\\\\\\" {", "z": [{"a": [1, 2]}, "<tool_call>"]}']
PREFIXES = [
    '{"name": "f", "arguments": ',
    '{"name":"f","parameters":',
    '\n {\n"name" : "f" , "arguments"\n:\t',
]


def texts() -> list[tuple[str, tuple[str, str | None, str]]]:
    """Return texts, each with its content, the name of its function and the arguments."""
    cases: list[tuple[str, tuple[str, str | None, str]]] = [
        (text, (text, None, ""))
        for text in (
            "",
            "Hello, world!",
            '{"na": 1}',
            '{"nam',
            " {",
            '"name"',
            "a <tool_cal",
            "<tool <tool_calm>",
            '\u00a0{"name": 1}',
            'He said {"name": "f", "arguments": {}}',
        )
    ]
    for prefix in PREFIXES:
        for arguments in ARGUMENTS:
            cases.append((f"{prefix}{arguments} }}", ("", "f", arguments)))
            tagged = f"<tool_call>{prefix}{arguments}}}\n</tool_call>"
            cases += [
                (tagged, ("", "f", arguments)),
                (f"\n {tagged}", ("", "f", arguments)),
                (f"Let me <see>.\n{tagged}", ("Let me <see>.\n", "f", arguments)),
                (f'{{"a": 1}} {tagged}', ('{"a": 1} ', "f", arguments)),
            ]
    return cases


def read(pieces: list[str]) -> tuple[str, str | None, str]:
    reader = ToolCallParser()
    content, arguments, name = "", "", None
    for at, piece in enumerate(pieces, 1):
        delta = reader.read(piece, last=at == len(pieces))
        content += delta.content
        assert name is None or delta.name is None
        assert delta.name is not None or name is not None or not delta.arguments
        name = name or delta.name
        arguments += delta.arguments
    assert reader.complete == bool(arguments)
    return content, name, arguments


@pytest.mark.parametrize("cut", ["whole", "characters", "anywhere"])
def test_calls_are_separated_from_content(cut: str) -> None:
    rng = random.Random(0)
    for text, expected in texts():
        for _ in range(10 if cut == "anywhere" else 1):
            places = sorted(rng.choices(range(len(text) + 1), k=4)) if cut == "anywhere" else []
            if cut == "characters":
                places = [*range(1, len(text))]
            ends = zip([0, *places], [*places, len(text)], strict=True)
            assert read([text[start:end] for start, end in ends]) == expected, text


def test_content_is_streamed_without_delay() -> None:
    """No text is withheld longer than needed to see that it is not a call."""
    reader = ToolCallParser()
    assert [reader.read(each, last=False).content for each in ("Hi", " <", "b", " {", "x")] == [
        "Hi", " ", "<b", " {", "x",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["<tool_call>", '{"name": "f"', 'Hm <tool_call>{"na'])
def test_incomplete_call_is_content(text: str) -> None:
    assert read([*text]) == (text, None, "")


def test_guide_and_parser_agree() -> None:
    """The guide allows all these texts except incomplete calls."""
    tokenizer = byte_tokenizer()
    compiler = GuideCompiler(tokenizer, 257, {256}, cpu_seconds=10.0, memory_mb=512)
    parameters = {"type": "object", "additionalProperties": True}
    guide = call_guide([Function(name="f", parameters=parameters)], required=False)
    forced = call_guide([Function(name="f", parameters=parameters)], required=True)
    for text, (content, name, arguments) in texts():
        for each_guide, expected_accepted in (
            (guide, True),
            (forced, name is not None and text[0] in "{\n"),
        ):
            matcher = compiler.new_matcher(each_guide)
            num_consumed = matcher._matcher.try_consume_tokens(tokenizer.encode(text))
            whole = num_consumed == len(text.encode()) and matcher._matcher.is_accepting()
            if "tool_call" not in text or each_guide is guide:
                assert whole == expected_accepted, text
        assert name is None or json.loads(arguments) is not None
        assert content or name or not text
