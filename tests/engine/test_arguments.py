"""Arguments of every kind: each works, or is refused by an error that names it."""

from __future__ import annotations

import asyncio
import os
import re
from copy import deepcopy
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
UNPRINTABLE: dict[str, Any] = {"10**5000": 10**5000, "[10**5000]": [10**5000]}
"""Numbers of more digits than Python converts to text: an error must not show them as they are."""
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="machines with GPUs have room for what is too large elsewhere"
)
ONE = SamplingParams(max_new_tokens=1)
CACHE: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 1,
    "head_dim": 2,
    "block_size": 4,
    "max_blocks_per_layer": 4,
    "device": "cpu",
    "dtype": torch.float32,
    "policy": AppendPolicy(triton=False),
    "layers_per_group": 1,
}


def accepts(name: str, call: Callable[[Any], object], values: dict[str, Any] = VALUES) -> set[str]:
    """Return the names of the values that work; errors for the others must match ``name``."""
    refused = {}
    for label, value in values.items():
        try:
            call(deepcopy(value))
        except RoseinferError as error:
            refused[label] = str(error)
        except Exception as error:
            raise AssertionError(f"{name}={label}: {type(error).__name__}: {error}") from error
    for label, message in refused.items():
        assert re.search(name, message), f"{label}: {message}"
        assert "Exception raised from" not in message, label
    return values.keys() - refused.keys()


@cache
def llm() -> LLM:
    return LLM("tiny", device="cpu", dtype="float32", kv_cache_tokens=256)


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams, AppendPolicy])
def test_settings(kind: Any) -> None:
    for field in fields(kind):

        def build(value: Any, name: str = field.name) -> None:
            kind(**{name: value})

        build(field.default)
        assert "object()" not in accepts(field.name, build, VALUES | UNPRINTABLE)


@pytest.mark.parametrize("name", ["environ", "triton"])
def test_variables(name: str) -> None:
    accepts(name, lambda value: AppendPolicy.from_env(**{name: value}))


@pytest.mark.parametrize("name", CACHE)
def test_a_cache(name: str) -> None:
    found = accepts(name, lambda value: KVBlockManager(**{**CACHE, name: value}))
    assert "object()" not in found


ROW, TOKEN, PROMPT = torch.zeros(1, 1, 2), torch.zeros(1, 2), torch.zeros(1, 1, 1, 2)
CALLS: dict[str, dict[str, Callable[[list[int], Any], Any]]] = {
    "plan_append": {"layer_idx": lambda *_: 0, "block_ids_list": lambda ids, _: [ids]},
    "reserve": {
        "layer_idx": lambda *_: 0,
        "block_ids_list": lambda ids, _: [ids],
        "num_tokens": lambda *_: [1],
    },
    "truncate": {
        "layer_idx": lambda *_: 0,
        "block_ids": lambda ids, _: ids,
        "length": lambda *_: 1,
    },
    "truncate_batch": {
        "layer_idx": lambda *_: 0,
        "block_ids_list": lambda ids, _: [ids],
        "lengths": lambda *_: [1],
    },
    "write": {
        "plan": lambda _, plan: plan,
        "layer_idx": lambda *_: 0,
        "key": lambda *_: ROW,
        "value": lambda *_: ROW,
    },
    "gather_sequence": {
        "layer_idx": lambda *_: 0,
        "block_ids": lambda ids, _: ids,
        "total_len": lambda *_: None,
    },
    "incref_blocks": {"block_ids": lambda ids, _: ids},
    "free_blocks": {"layer_idx": lambda *_: 0, "block_ids": lambda ids, _: ids},
    "num_free_blocks": {"layer_idx": lambda *_: 0},
    "refcount": {"block_id": lambda ids, _: ids[0]},
    "block_info": {"block_id": lambda ids, _: ids[0]},
    "append_token": {
        "layer_idx": lambda *_: 0,
        "block_ids": lambda ids, _: ids,
        "key": lambda *_: TOKEN,
        "value": lambda *_: TOKEN,
    },
    "append_token_batch": {
        "layer_idx": lambda *_: 0,
        "block_ids_list": lambda ids, _: [ids],
        "key": lambda *_: ROW,
        "value": lambda *_: ROW,
    },
    "register_prefill_layer": {
        "layer_idx": lambda *_: 0,
        "key": lambda *_: PROMPT,
        "value": lambda *_: PROMPT,
    },
}
"""For each call of a cache, what its arguments are of a list of three tokens, and of a plan."""
STORED = "truncate to .*, but . tokens are stored"
SAID = {
    "block_id": "block",
    "block_ids": f"block|{STORED}",
    "block_ids_list": f"block|{STORED}|key and value must be",
    "layer_idx": "layer",
    "length": f"length|{STORED}",
    "lengths": f"length|{STORED}",
    "num_tokens": "num_tokens|token count|free blocks",
}
"""What an error says of an argument: block 7 and layer 9 are named by their numbers."""


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, right in CALLS.items() for name in right]
)
def test_a_call_of_a_cache(call: str, name: str) -> None:
    """One that is refused has changed nothing."""
    changed = []

    def try_it(value: Any) -> None:
        cache = KVBlockManager(**CACHE | {"policy": AppendPolicy(triton=False)})
        ids: list[int] = []
        cache.plan_append(0, [ids], [3])
        plan = cache.plan_append(0, [[]])

        def books() -> object:
            counts = [cache.refcount(block) for block in range(1, 4)]
            return [*ids], [cache.block_info(block).length for block in range(1, 4)], counts

        arguments = {each: right(ids, plan) for each, right in CALLS[call].items()}
        before = books()
        try:
            getattr(cache, call)(**arguments | {name: value})
        except RoseinferError:
            changed.append(books() != before)
            raise

    accepts(SAID.get(name, name), try_it)
    assert changed
    assert not any(changed)


@pytest.mark.parametrize("count", [1.5, "1", None, [1]])
def test_a_number_of_tokens_that_is_none(count: Any) -> None:
    cache = KVBlockManager(**CACHE | {"policy": AppendPolicy(triton=False)})
    with pytest.raises(RoseinferError, match="num_tokens a whole number"):
        cache.plan_append(0, [[], []], [1, count])
    assert cache.num_free_blocks(0) == 3


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_query_hub", lambda _: OSError("there is no network"))
    for value in VALUES.values():
        with pytest.raises(RoseinferError, match=r"is not a model|cannot be loaded: "):
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


def test_a_setting_of_another_name() -> None:
    wrong: dict[str, Any] = {"blocksize": 16}
    with pytest.raises(
        RoseinferError, match=r"unknown setting 'blocksize'; did you mean block_size\?"
    ):
        LLM("tiny", **wrong)


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


@pytest.mark.parametrize(
    "tokens",
    ["x", 1.5, [None], ["a"], [[1]], True, b"x", object()],
    ids=lambda each: type(each).__name__,
)
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
    with pytest.raises(
        RoseinferError, match=r"has no language-model head: .* AutoModelForCausalLM"
    ):
        load(headless)
