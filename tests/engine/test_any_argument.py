"""Arguments of every kind: each works, or is refused by an error that names it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from roseinfer import (
    LLM,
    AppendPolicy,
    AsyncLLM,
    EngineConfig,
    KVBlockManager,
    RoseinferError,
    SamplingParams,
    tiny_gpt2,
)
from roseinfer.models import source

if TYPE_CHECKING:
    from collections.abc import Callable

VALUES: dict[str, Any] = {
    "None": None,
    "''": "",
    "'x'": "x",
    "'1'": "1",
    "a lone surrogate": "\ud800",
    "b'x'": b"x",
    "True": True,
    "3": 3,
    "-1": -1,
    "0": 0,
    "2**31": 2**31,
    "10**20": 10**20,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": -float("inf"),
    "numpy int": numpy.int64(3),
    "numpy float": numpy.float32(0.5),
    "numpy ids": numpy.array([1, 2]),
    "numpy rows of ids": numpy.array([[1, 2], [3, 4]]),
    "tensor": torch.tensor(1),
    "tensor of ids": torch.tensor([1, 2]),
    "[]": [],
    "[[]]": [[]],
    "{}": {},
    "('a', 1)": ("a", 1),
    "{None}": {None},
    "object()": object(),
    "a function": os.system,
    "a class": int,
}
"""Each is wrong for most arguments."""
ONE = SamplingParams(max_new_tokens=1)
CACHE: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 1,
    "head_dim": 2,
    "block_size": 4,
    "max_blocks_per_layer": 4,
    "device": "cpu",
    "dtype": torch.float32,
    "policy": None,
    "layers_per_group": 1,
}


def accepts(name: str, call: Callable[[Any], object]) -> set[str]:
    """Return the names of the values that work; the others must be refused by ``name``."""
    refused = {}
    for label, value in VALUES.items():
        try:
            call(value)
        except RoseinferError as error:
            refused[label] = str(error)
        except Exception as error:
            raise AssertionError(f"{name}={label}: {type(error).__name__}: {error}") from error
    for label, message in refused.items():
        assert name in message, f"{label}: {message}"
        assert "Exception raised from" not in message, label
    return VALUES.keys() - refused.keys()


@cache
def llm() -> LLM:
    return LLM("tiny", device="cpu", dtype="float32", kv_cache_tokens=256)


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams, AppendPolicy])
def test_settings(kind: Any) -> None:
    for field in fields(kind):

        def build(value: Any, name: str = field.name) -> None:
            kind(**{name: value})

        build(field.default)
        assert "object()" not in accepts(field.name, build)


@pytest.mark.parametrize("name", ["environ", "triton"])
def test_variables(name: str) -> None:
    accepts(name, lambda value: AppendPolicy.from_env(**{name: value}))


@pytest.mark.parametrize("name", CACHE)
def test_a_cache(name: str) -> None:
    found = accepts(name, lambda value: KVBlockManager(**{**CACHE, name: value}))
    assert "object()" not in found


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_ask_the_hub", lambda _: OSError("there is no network"))
    for value in VALUES.values():
        with pytest.raises(RoseinferError, match=r"is no model|cannot be loaded: "):
            LLM(value, device="cpu")


@pytest.mark.parametrize("name", ["device", "dtype", "tokenizer"])
def test_how_a_model_is_loaded(name: str) -> None:
    arguments = {"device": "cpu", "kv_cache_tokens": 64}
    network = tiny_gpt2().model
    found = accepts(name, lambda value: LLM(network, **{**arguments, name: value}))
    assert found == {"None"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 10**9),
        ("block_size", 10**18),
        ("kv_cache_tokens", 10**12),
        ("kv_cache_tokens", 10**18),
        ("max_batch_size", 10**20),
        ("max_length", 10**18),
        ("append_policy", "x"),
        ("tokenizer", "gpt2"),
        ("tokenizer", tiny_gpt2().tokenizer.backend_tokenizer),
    ],
)
def test_what_no_machine_has(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"kv_cache_tokens": 64, "resident_decode": True, "device": "cpu"}
    with pytest.raises(RoseinferError, match=name) as refusal:
        LLM(tiny_gpt2().model, **{**arguments, name: value})
    assert " 0.0 GiB" not in str(refusal.value)


def test_generate() -> None:
    def served(prompts: Any) -> None:
        outputs = llm().generate(prompts, ONE, progress=False)
        for output in outputs:
            if output.error:
                raise RoseinferError(output.error)

    ids = {"numpy ids", "numpy rows of ids", "tensor of ids"}
    assert accepts("prompt", served) == {"'x'", "'1'", "[]"} | ids
    inside = accepts("prompt", lambda value: served(["x", value]))
    assert inside == {"'x'", "'1'", "numpy ids", "tensor of ids"}
    # The output of the only prompt says that a list is no parameters.
    assert accepts("params", lambda value: llm().generate("x", value)) == {"None", "[[]]"}
    assert accepts("progress", lambda value: llm().generate("x", ONE, progress=value)) == {
        "None",
        "True",
    }


@pytest.mark.parametrize("ids", [numpy.array([72, 105]), torch.tensor([72, 105])], ids=type)
def test_an_array_of_ids_is_one_prompt(ids: Any) -> None:
    (expected,) = llm().generate([72, 105], ONE)
    for prompts in (ids, list(ids), [ids]):
        (output,) = llm().generate(prompts, ONE)
        assert output.token_ids == expected.token_ids
    both = llm().generate([ids, ids[:1]], ONE)
    assert [len(output.prompt) for output in both] == [2, 1]


def test_stream() -> None:
    texts = {"'x'", "'1'", "numpy ids", "tensor of ids"}
    assert accepts("prompt", lambda value: list(llm().stream(value, ONE))) == texts
    assert accepts("params", lambda value: list(llm().stream("x", value))) == {"None"}


def test_streams_of_a_server() -> None:
    accepts("AsyncLLM", AsyncLLM)
    served = AsyncLLM(llm())

    async def stream(prompt: Any, params: Any) -> None:
        async for _ in served.stream(prompt, params):
            pass

    try:
        texts = {"'x'", "'1'", "numpy ids", "tensor of ids"}
        assert accepts("prompt", lambda value: asyncio.run(stream(value, ONE))) == texts
        assert accepts("params", lambda value: asyncio.run(stream("x", value))) == {"None"}
        whole = accepts("prompt", lambda value: asyncio.run(served.generate(value, ONE)))
        assert whole == texts
    finally:
        served.close()


# --------------------------------------------------------------------------- models


def load(network: Any) -> LLM:
    return LLM(network, device="cpu", kv_cache_tokens=64)


@pytest.mark.parametrize("tokens", ["x", 1.5, [None], ["a"], [[1]], True, b"x", object()], ids=repr)
def test_tokens_that_end_a_text(tokens: Any) -> None:
    network = tiny_gpt2().model
    vars(network.generation_config)["eos_token_id"] = tokens
    with pytest.raises(RoseinferError, match="eos_token_id of the GenerationConfig is"):
        load(network)


@pytest.mark.parametrize("kind", ["base_model", "classifier"])
def test_a_model_without_a_head(kind: str) -> None:
    from transformers import GPT2ForSequenceClassification

    network = tiny_gpt2().model
    headless = network.base_model
    if kind == "classifier":
        headless = GPT2ForSequenceClassification(network.config)
    with pytest.raises(RoseinferError, match=r"has no head .* AutoModelForCausalLM"):
        load(headless)
