"""Guides that cannot be followed: rejected with a reason, and without effect on others."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from roseinfer import LLM, BadArgument, ConfigError, Guide, SamplingParams, tiny_gpt2
from roseinfer.guided import compiler
from roseinfer.guided.grammar import compile_guide
from roseinfer.guided.guide import MAX_GUIDE_CHARACTERS
from tests.engine.continuations import END, one
from tests.guided.constraints import engine, generate_all
from tests.llm.served_streams import collect, serving, tokens_of
from tests.python_process import run_python

FREE = SamplingParams(max_new_tokens=12)

INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "this has none of them"),
    ({"regex": "a", "choice": ("b",)}, "this has regex and choice"),
    ({"json_object": 1}, "must be True"),
    ({"json_schema": "{"}, "is not JSON"),
    ({"json_schema": {"a": {1}}}, "is not JSON"),
    ({"json_schema": {"a": float("nan")}}, "is not JSON"),
    ({"json_schema": "[]"}, "must be a JSON object"),
    ({"json_schema": True}, "must be a JSON object"),
    ({"regex": 1}, "must be a text"),
    ({"grammar": b"a"}, "must be a text"),
    ({"choice": "ab"}, "must be one or more texts in a list"),
    ({"choice": []}, "must be one or more texts in a list"),
    ({"choice": ["a", ""]}, "none of them empty"),
    ({"choice": [1]}, "more texts in a list"),
    ({"regex": "a" * (MAX_GUIDE_CHARACTERS + 1)}, f"at most {MAX_GUIDE_CHARACTERS}"),
    ({"choice": ["a" * 1000] * 66}, "66000 characters"),
]


@pytest.mark.parametrize(("fields", "message"), INVALID, ids=str)
def test_invalid_guide_is_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        Guide(**fields)


def test_guides_compare_by_value_and_are_frozen() -> None:
    words = ["a", "b"]
    guide = Guide(choice=words)  # type: ignore[arg-type]
    words.append("c")
    assert guide == Guide(choice=("a", "b"))
    assert Guide(json_schema={"type": "object"}) == Guide(json_schema='{"type":"object"}')
    with pytest.raises(FrozenInstanceError):
        guide.regex = "a"  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"SamplingParams\.guide .* must be a Guide or None"):
        SamplingParams(guide="a")  # type: ignore[arg-type]


UNCOMPILABLE: list[tuple[Guide, str]] = [
    (Guide(json_schema={"type": "strin"}), "strin"),
    (Guide(json_schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
    (Guide(json_schema={"$ref": "https://example.org/schema"}), "example.org"),
    (Guide(json_schema={"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
    (Guide(json_schema={"$ref": "#"}), "no text matches it"),
    (Guide(regex="(a"), "unclosed group"),
    (Guide(regex="(a?){1000}a{1000}"), "too many expressions"),
    (Guide(json_schema={"type": "string", "pattern": "a?" * 30_000}), "too many expressions"),
    (Guide(regex="(?=a)b"), "look-around"),
    (Guide(grammar="begin: 'a'"), "cannot be compiled"),
]


def test_deep_guides_are_rejected_with_short_reasons(device: str) -> None:
    llm = engine(device)
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    too_complex = [
        Guide(regex="(" * 30_000 + ")" * 30_000),
        Guide(json_schema={"pattern": "(" * 30_000 + ")" * 30_000}),
        Guide(json_schema=deep),
        Guide(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    ]
    for output in generate_all(
        llm, [[1]] * 4, [SamplingParams(guide=guide) for guide in too_complex]
    ):
        assert "the constraint cannot be compiled: " in str(output.error)
        assert len(str(output.error)) < 600


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("guide", "message"), UNCOMPILABLE, ids=str)
def test_uncompilable_guide_fails_only_its_request(device: str, guide: Guide, message: str) -> None:
    llm = engine(device)
    rejected, free = generate_all(llm, [[1], [2]], [SamplingParams(guide=guide), FREE])
    assert rejected.finish_reason == "error"
    assert "the constraint cannot be compiled: " in str(rejected.error)
    assert message in str(rejected.error)
    assert free.token_ids == one(engine(device), [2], FREE).token_ids


@pytest.mark.parametrize("resident", [False, True])
def test_guide_that_becomes_too_complex_fails_only_its_request(device: str, resident: bool) -> None:
    llm = engine(device, resident_decode=resident)
    pattern = "[xy]{10}(a?){1000}a{1000}"  # too late for the trial
    too_complex = SamplingParams(guide=Guide(regex=pattern), max_new_tokens=30)
    failed, free = generate_all(llm, [[1], [2]], [too_complex, FREE])
    assert failed.finish_reason == "error"
    assert str(failed.error).startswith("the guide is too complex at this token: ")
    assert free.token_ids == one(engine(device), [2], FREE).token_ids


def test_stream_with_an_invalid_guide_raises_alone(device: str) -> None:
    with serving(engine(device)) as served:

        async def collect_both() -> Any:
            invalid = SamplingParams(guide=Guide(regex="(a"))
            valid = SamplingParams(guide=Guide(choice=("yes", "no")))
            streams = [collect(served, [1], each) for each in (invalid, valid)]
            return await asyncio.gather(*streams, return_exceptions=True)

        rejected, updates = asyncio.run(collect_both())
    assert isinstance(rejected, BadArgument)
    assert "unclosed group" in str(rejected)
    assert tokens_of(updates) in ([*b"yes"], [*b"no"], [*b"no", END])


def test_guides_are_rejected_without_a_tokenizer(device: str) -> None:
    llm = LLM(tiny_gpt2(device).model, device=device, dtype="float32", kv_cache_tokens=256)
    output = one(llm, [1, 2], SamplingParams(guide=Guide(json_object=True)))
    assert output.error == "guides need a tokenizer, and this model has none; give a tokenizer"


def test_grammars_are_cached_up_to_a_limit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Guide] = []

    def recorded_compile(guide: Guide, tokenizer: Any) -> Any:
        compiled.append(guide)
        return compile_guide(guide, tokenizer)

    monkeypatch.setattr(compiler, "compile_guide", recorded_compile)
    monkeypatch.setattr(compiler, "_MAX_CACHED_GRAMMARS", 3)
    llm = engine(device)
    guides = [Guide(choice=(word,)) for word in "abcd"]
    params = [SamplingParams(guide=guides[at]) for at in (0, 1, 2, 0, 3, 0, 1, 1)]
    texts = [output.text for output in generate_all(llm, [[1]] * 8, params)]
    assert texts == [*"abcadabb"]
    assert compiled == [guides[at] for at in (0, 1, 2, 3, 1)]


def test_requests_without_guides_do_not_import_llguidance() -> None:
    code = """
        import sys
        from roseinfer import LLM, Guide, SamplingParams
        llm = LLM("tiny", device="cpu")
        Guide(json_object=True)
        llm.generate("a", SamplingParams(max_new_tokens=2), progress=False)
        print("llguidance" in sys.modules)
    """
    assert run_python(code, warm=True).split() == ["False"]


def test_missing_llguidance_is_reported_with_the_install_command(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = engine(device)
    params = SamplingParams(guide=Guide(json_object=True))
    rejected, free = generate_all(llm, [[1], [2]], [params, FREE])
    assert free.error is None
    assert "guides need llguidance, which is not installed: run pip install '.[guided]'" in str(
        rejected.error
    )
