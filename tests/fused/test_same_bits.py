"""What a request gets has the same bits in any batch, and bugs in arithmetic are found by that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, ConfigError, SamplingParams
from roseinfer.bench.speculation_bench import repeating
from roseinfer.kernels import attend_decode
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.models import batch_trial, loading
from tests.engine.repeating import drafted
from tests.fused import same_bits
from tests.lanes.planted import Planted, module_with

if TYPE_CHECKING:
    from pathlib import Path

on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, in other orders"
)
MIXES = 25
EXACT: dict[str, Any] = {"batch_invariant": True, "max_length": 512, "kv_cache_tokens": 4096}
REPEATING = [[7, 3, 90], [12] * 70, [5, 6, 7, 8, 5, 6, 7, 8]]
TOLD = [
    SamplingParams(
        max_new_tokens=100, ignore_eos=True, logprobs=True, temperature=temperature, seed=seed
    )
    for seed, temperature in enumerate((0.0, 0.0, 0.2))
]


@on_a_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2", "mixtral"])
def test_every_row_of_logits_as_alone(device: str, kin: str) -> None:
    if device != "cuda":
        pytest.skip("this is about a GPU")
    assert list(same_bits.differing(same_bits.model_of(kin), MIXES, seed=1)) == []


@on_a_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2"])
def test_drafted_texts_and_their_log_probabilities(device: str, kin: str) -> None:
    """This holds for requests that draw, too, and for several at once."""
    if device != "cuda":
        pytest.skip("this is about a GPU")
    told = []
    for speculation in (None, "ngram"):
        llm = LLM(
            repeating(same_bits.model_of(kin)), device=device, **EXACT, speculation=speculation
        )
        outputs = llm.generate(REPEATING, TOLD, progress=False)
        told.append([(each.token_ids, each.logprobs) for each in outputs])
    assert drafted(llm)[1] > 100
    assert told[0] == told[1]


PLANTED = {
    "a mask one wide": Planted(
        "reads", "k_cache", "chunks", "seen = distance > 0\n", "seen = distance > 1\n"
    ),
    "a dropped tail": Planted(
        "reads",
        "k_cache",
        "attend",
        "stored = (tokens >= begin) & (tokens < end)\n",
        "stored = (tokens >= begin) & (tokens < end - (end % 64 == 63))\n",
    ),
}
_WHERE = {
    "a mask one wide": ("attend_chunks", "paged_attention_chunks"),
    "a dropped tail": ("attend_decode", "append_and_attend"),
}
"""The file of each, and the function that others call."""


@on_a_gpu
@pytest.mark.parametrize("bug", PLANTED)
def test_wrong_arithmetic_is_found(
    device: str, bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cuda":
        pytest.skip("this is about a GPU")
    network = same_bits.model_of("llama")
    family, door = _WHERE[bug]
    wrong = module_with(PLANTED[bug], family, tmp_path)
    monkeypatch.setattr(f"roseinfer.kernels.{family}.{door}", getattr(wrong, door))
    assert list(same_bits.differing(network, 5, seed=2))


@on_a_gpu
def test_another_order_of_adding_up_is_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are as good; half a tile of tokens goes through the decode kernel at a time."""
    if device != "cuda":
        pytest.skip("this is about a GPU")
    monkeypatch.setattr(attend_decode, "tile_of_tokens", lambda _: 32)
    assert list(same_bits.differing(same_bits.model_of("llama"), 5, seed=3))


@on_a_gpu
def test_products_that_depend_on_the_rows_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cuda":
        pytest.skip("this is about a GPU")
    network = same_bits.model_of("llama")
    settle: Any = loading._settle_batch_invariance
    llm = LLM(network, device=device, kv_cache_tokens=64)
    assert llm.batch_invariant
    fused = llm.engine.sessions.model
    fused.batch_invariant = False
    assert not batch_trial.same_bits_in_any_batch(fused, 2112), "products of more than 512 rows"
    monkeypatch.setattr(loading, "same_bits_in_any_batch", lambda *_: False)
    with pytest.raises(ConfigError, match="batch_invariant=True: matrix products of torch"):
        settle(fused, llm.config.__class__(batch_invariant=True))
    assert not LLM(network, device=device, kv_cache_tokens=64).batch_invariant


def test_a_model_without_kernels_refuses_it(device: str) -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: GPT2LMHeadModel runs on its own"):
        LLM("tiny", device=device, fused_model=False, batch_invariant=True)


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled, and so none runs on a CPU")
def test_a_cpu_refuses_it() -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: the kernels keep one order"):
        LLM("tiny", device="cpu", fused_model=True, batch_invariant=True)
    assert not LLM("tiny", device="cpu", kv_cache_tokens=64).batch_invariant
