"""Which function a text calls, in whatever pieces the text comes."""

from __future__ import annotations

import json
import random

import pytest

from roseinfer.guided.compiler import GuideCompiler
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.server.schemas.tools import Function, ToolCallParser, call_guide

ARGUMENTS = ['{"x": 1}', "{ }", '{"y": "}]\\\\\\" {", "z": [{"a": [1, 2]}, "<tool_call>"]}']
BEGINS = [
    '{"name": "f", "arguments": ',
    '{"name":"f","parameters":',
    '\n {\n"name" : "f" , "arguments"\n:\t',
]


def texts() -> list[tuple[str, tuple[str, str | None, str]]]:
    """Return texts, each with what it says, the function it calls and the arguments."""
    found: list[tuple[str, tuple[str, str | None, str]]] = [
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
    for begin in BEGINS:
        for arguments in ARGUMENTS:
            found.append((f"{begin}{arguments} }}", ("", "f", arguments)))
            tagged = f"<tool_call>{begin}{arguments}}}\n</tool_call>"
            found += [
                (tagged, ("", "f", arguments)),
                (f"\n {tagged}", ("", "f", arguments)),
                (f"Let me <see>.\n{tagged}", ("Let me <see>.\n", "f", arguments)),
                (f'{{"a": 1}} {tagged}', ('{"a": 1} ', "f", arguments)),
            ]
    return found


def read(pieces: list[str]) -> tuple[str, str | None, str]:
    reader = ToolCallParser()
    content, arguments, name = "", "", None
    for at, piece in enumerate(pieces, 1):
        said = reader.read(piece, last=at == len(pieces))
        content += said.content
        assert name is None or said.name is None
        assert said.name is not None or name is not None or not said.arguments
        name = name or said.name
        arguments += said.arguments
    assert reader.complete == bool(arguments)
    return content, name, arguments


@pytest.mark.parametrize("cut", ["whole", "characters", "anywhere"])
def test_calls_are_told_from_what_is_said(cut: str) -> None:
    rng = random.Random(0)
    for text, want in texts():
        for _ in range(10 if cut == "anywhere" else 1):
            places = sorted(rng.choices(range(len(text) + 1), k=4)) if cut == "anywhere" else []
            if cut == "characters":
                places = [*range(1, len(text))]
            ends = zip([0, *places], [*places, len(text)], strict=True)
            assert read([text[begin:end] for begin, end in ends]) == want, text


def test_a_text_is_told_while_it_is_written() -> None:
    """Nothing is held back longer than it takes to see that it is no call."""
    reader = ToolCallParser()
    assert [reader.read(each, last=False).content for each in ("Hi", " <", "b", " {", "x")] == [
        "Hi", " ", "<b", " {", "x",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["<tool_call>", '{"name": "f"', 'Hm <tool_call>{"na'])
def test_a_call_that_was_cut_off_is_text(text: str) -> None:
    assert read([*text]) == (text, None, "")


def test_the_form_and_the_reader_agree() -> None:
    """The form allows all these texts but those that begin a call and are none."""
    tokenizer = byte_tokenizer()
    compiler = GuideCompiler(tokenizer, 257, {256}, cpu_seconds=10.0, memory_mb=512)
    parameters = {"type": "object", "additionalProperties": True}
    guide = call_guide([Function(name="f", parameters=parameters)], required=False)
    forced = call_guide([Function(name="f", parameters=parameters)], required=True)
    for text, (content, name, arguments) in texts():
        for one, wanted in ((guide, True), (forced, name is not None and text[0] in "{\n")):
            progress = compiler.new_matcher(one)
            taken = progress._matcher.try_consume_tokens(tokenizer.encode(text))
            whole = taken == len(text.encode()) and progress._matcher.is_accepting()
            if "tool_call" not in text or one is guide:
                assert whole == wanted, text
        assert name is None or json.loads(arguments) is not None
        assert content or name or not text
