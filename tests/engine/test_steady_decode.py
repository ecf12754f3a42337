"""Decode steps in which only the tokens change: no imports, no synchronization."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roseinfer import LLM, SamplingParams
from tests.models.families import VOCABULARY, tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

REQUESTS = 3
TENSOR_FROM_LIST = {"tensor", "as_tensor", "from_numpy", "_make_subclass"}
READ_BACK = {"_local_scalar_dense", "item", "is_nonzero", "nonzero"}


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of dispatched tensor operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def steady(device: str, family: str) -> LLM:
    """Build an engine in the middle of decoding, whose next steps open no block."""
    llm = LLM(
        tiny(family, device),
        device=device,
        block_size=32,
        kv_cache_tokens=512,
        paged_attention=True,
    )
    for at in range(REQUESTS):
        prompt = [(at * 5 + token) % VOCABULARY for token in range(3)]
        llm.engine.submit(prompt, SamplingParams(temperature=0, max_new_tokens=60))
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.num_running == REQUESTS
    return llm


def python_calls(call: Callable[[], object]) -> Counter[str]:
    """Count all function calls, in Python or C, by module and name."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            calls[f"{getattr(arg, '__module__', None)}.{getattr(arg, '__name__', '')}"] += 1
        elif event == "call":
            calls[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_step_imports_nothing_and_reads_no_environment_variables(
    device: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = steady(device, family).engine
    variables: list[str] = []
    imported: list[str] = []
    real_import = __import__

    def recorded_import(name: str, scope: Any = None, *rest: Any) -> Any:
        if str((scope or {}).get("__name__", "")).startswith("roseinfer"):
            imported.append(name)
        return real_import(name, scope, *rest)

    monkeypatch.setattr("builtins.__import__", recorded_import)
    for name in ("get", "__getitem__"):
        real = getattr(type(os.environ), name)

        def recorded_read(self: Any, key: str, *rest: Any, real: Any = real) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("roseinfer"):
                variables.append(key)
            return real(self, key, *rest)

        monkeypatch.setattr(type(os.environ), name, recorded_read)
    engine.step()
    assert imported == []
    assert variables == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_step_builds_no_tensor_from_lists_and_reads_back_only_tokens(
    device: str, family: str
) -> None:
    engine = steady(device, family).engine
    dispatched = Dispatched()
    with dispatched:
        calls = python_calls(engine.step)
    assert not {name for name in calls if name.split(".")[-1] in TENSOR_FROM_LIST}
    assert not set(dispatched.names) & READ_BACK
    assert calls["None.tolist"] == 1, "expected one readback for all requests"


@pytest.mark.slow
def test_steady_steps_run_the_same_operations(device: str) -> None:
    engine = steady(device, "gpt2").engine
    counts = []
    for _ in range(5):
        with Dispatched() as dispatched:
            engine.step()
        counts.append(dispatched.names)
    assert all(each == counts[0] for each in counts)


def test_step_does_not_synchronize(device: str) -> None:
    if device != "cuda":
        pytest.skip("a CPU has nothing to wait for")
    engine = steady(device, "llama").engine
    for _ in range(2):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    assert not syncs, "expected tokens to be copied after the step and awaited by an event"
