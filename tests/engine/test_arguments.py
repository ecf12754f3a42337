"""Invalid arguments of every kind: each works or raises an error that names it."""

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
from roseinfer.models import locate_model

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
"""Values that are wrong for most arguments."""
UNPRINTABLE: dict[str, Any] = {"10**5000": 10**5000, "[10**5000]": [10**5000]}
"""Numbers with more digits than Python converts to text: errors must not print them as they are."""
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="GPU machines have memory for values too large elsewhere"
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


def accepted_values(
    name: str, call: Callable[[Any], object], values: dict[str, Any] = VALUES
) -> set[str]:
    """Return the names of the values that work; errors for the others must match ``name``."""
    rejected = {}
    for label, value in values.items():
        try:
            call(deepcopy(value))
        except RoseinferError as error:
            rejected[label] = str(error)
        except Exception as error:
            raise AssertionError(f"{name}={label}: {type(error).__name__}: {error}") from error
    for label, message in rejected.items():
        assert re.search(name, message), f"{label}: {message}"
        assert "Exception raised from" not in message, label
    return values.keys() - rejected.keys()


@cache
def llm() -> LLM:
    return LLM("tiny", device="cpu", dtype="float32", kv_cache_tokens=256)


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams, AppendPolicy])
def test_settings_reject_invalid_values(kind: Any) -> None:
    for field in fields(kind):

        def build(value: Any, name: str = field.name) -> None:
            kind(**{name: value})

        build(field.default)
        assert "object()" not in accepted_values(field.name, build, VALUES | UNPRINTABLE)


@pytest.mark.parametrize("name", ["environ", "triton"])
def test_environment_variables_reject_invalid_values(name: str) -> None:
    accepted_values(name, lambda value: AppendPolicy.from_env(**{name: value}))


@pytest.mark.parametrize("name", CACHE)
def test_cache_constructor_rejects_invalid_arguments(name: str) -> None:
    accepted = accepted_values(name, lambda value: KVBlockManager(**{**CACHE, name: value}))
    assert "object()" not in accepted


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
"""Valid arguments of each cache call, given a list of three tokens and a plan."""
STORED = "truncate to .*, but . tokens are stored"
ERROR_PATTERNS = {
    "block_id": "block",
    "block_ids": f"block|{STORED}",
    "block_ids_list": f"block|{STORED}|key and value must be",
    "layer_idx": "layer",
    "length": f"length|{STORED}",
    "lengths": f"length|{STORED}",
    "num_tokens": "num_tokens|token count|free blocks",
}
"""Patterns of the error for an argument: block 7 and layer 9 are named by their numbers."""


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, valid in CALLS.items() for name in valid]
)
def test_cache_calls_reject_invalid_arguments(call: str, name: str) -> None:
    """A rejected call changes nothing."""
    changed = []

    def call_with(value: Any) -> None:
        cache = KVBlockManager(**CACHE | {"policy": AppendPolicy(triton=False)})
        ids: list[int] = []
        cache.plan_append(0, [ids], [3])
        plan = cache.plan_append(0, [[]])

        def snapshot() -> object:
            counts = [cache.refcount(block) for block in range(1, 4)]
            return [*ids], [cache.block_info(block).length for block in range(1, 4)], counts

        arguments = {each: valid(ids, plan) for each, valid in CALLS[call].items()}
        before = snapshot()
        try:
            getattr(cache, call)(**arguments | {name: value})
        except RoseinferError:
            changed.append(snapshot() != before)
            raise

    accepted_values(ERROR_PATTERNS.get(name, name), call_with)
    assert changed
    assert not any(changed)


@pytest.mark.parametrize("count", [1.5, "1", None, [1]])
def test_plan_append_rejects_token_counts_that_are_not_integers(count: Any) -> None:
    cache = KVBlockManager(**CACHE | {"policy": AppendPolicy(triton=False)})
    with pytest.raises(RoseinferError, match="num_tokens a whole number"):
        cache.plan_append(0, [[], []], [1, count])
    assert cache.num_free_blocks(0) == 3


def test_llm_rejects_invalid_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate_model, "_query_hub", lambda _: OSError("there is no network"))
    for value in VALUES.values():
        with pytest.raises(RoseinferError, match=r"is not a model|cannot be loaded: "):
            LLM(value, device="cpu")


@pytest.mark.parametrize("name", ["device", "dtype", "tokenizer"])
def test_llm_rejects_invalid_loading_options(name: str) -> None:
    arguments = {"device": "cpu", "kv_cache_tokens": 64}
    network = tiny_gpt2().model
    accepted = accepted_values(name, lambda value: LLM(network, **{**arguments, name: value}))
    assert accepted == {"None"}


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
def test_llm_rejects_sizes_beyond_memory(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"kv_cache_tokens": 64, "resident_decode": True, "device": "cpu"}
    with pytest.raises(RoseinferError, match=name) as refusal:
        LLM(tiny_gpt2().model, **{**arguments, name: value})
    assert " 0.0 GiB" not in str(refusal.value)


def test_unknown_setting_suggests_a_similar_name() -> None:
    misspelled: dict[str, Any] = {"blocksize": 16}
    with pytest.raises(
        RoseinferError, match=r"unknown setting 'blocksize'; did you mean block_size\?"
    ):
        LLM("tiny", **misspelled)


def test_generate_rejects_invalid_arguments() -> None:
    def generate(prompts: Any) -> None:
        outputs = llm().generate(prompts, ONE, progress=False)
        for output in outputs:
            if output.error:
                raise RoseinferError(output.error)

    ids = {"numpy ids", "numpy rows of ids", "tensor of ids"}
    assert accepted_values("prompt", generate) == {"'x'", "'1'", "[]"} | ids
    accepted_in_list = accepted_values("prompt", lambda value: generate(["x", value]))
    assert accepted_in_list == {"'x'", "'1'", "numpy ids", "tensor of ids"}
    # The output of a single prompt reports that a list is not parameters.
    assert accepted_values("params", lambda value: llm().generate("x", value)) == {"None", "[[]]"}
    assert accepted_values("progress", lambda value: llm().generate("x", ONE, progress=value)) == {
        "None",
        "True",
    }


@pytest.mark.parametrize("ids", [numpy.array([72, 105]), torch.tensor([72, 105])], ids=type)
def test_array_of_ids_is_one_prompt(ids: Any) -> None:
    (expected,) = llm().generate([72, 105], ONE)
    for prompts in (ids, list(ids), [ids]):
        (output,) = llm().generate(prompts, ONE)
        assert output.token_ids == expected.token_ids
    both = llm().generate([ids, ids[:1]], ONE)
    assert [len(output.prompt) for output in both] == [2, 1]


def test_stream_rejects_invalid_arguments() -> None:
    texts = {"'x'", "'1'", "numpy ids", "tensor of ids"}
    assert accepted_values("prompt", lambda value: list(llm().stream(value, ONE))) == texts
    assert accepted_values("params", lambda value: list(llm().stream("x", value))) == {"None"}


def test_async_streams_reject_invalid_arguments() -> None:
    accepted_values("AsyncLLM", AsyncLLM)
    async_llm = AsyncLLM(llm())

    async def stream(prompt: Any, params: Any) -> None:
        async for _ in async_llm.stream(prompt, params):
            pass

    try:
        texts = {"'x'", "'1'", "numpy ids", "tensor of ids"}
        assert accepted_values("prompt", lambda value: asyncio.run(stream(value, ONE))) == texts
        assert accepted_values("params", lambda value: asyncio.run(stream("x", value))) == {"None"}
        whole = accepted_values("prompt", lambda value: asyncio.run(async_llm.generate(value, ONE)))
        assert whole == texts
    finally:
        async_llm.close()


# --------------------------------------------------------------------------- models


def load(network: Any) -> LLM:
    return LLM(network, device="cpu", kv_cache_tokens=64)


@pytest.mark.parametrize(
    "tokens",
    ["x", 1.5, [None], ["a"], [[1]], True, b"x", object()],
    ids=lambda each: type(each).__name__,
)
def test_invalid_eos_token_id_is_rejected(tokens: Any) -> None:
    network = tiny_gpt2().model
    vars(network.generation_config)["eos_token_id"] = tokens
    with pytest.raises(RoseinferError, match="eos_token_id of the GenerationConfig is"):
        load(network)


@pytest.mark.parametrize("kind", ["base_model", "classifier"])
def test_model_without_a_head_is_rejected(kind: str) -> None:
    from transformers import GPT2ForSequenceClassification

    network = tiny_gpt2().model
    headless = network.base_model
    if kind == "classifier":
        headless = GPT2ForSequenceClassification(network.config)
    with pytest.raises(
        RoseinferError, match=r"has no language-model head: .* AutoModelForCausalLM"
    ):
        load(headless)
