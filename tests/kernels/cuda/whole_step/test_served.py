"""An engine whose steps of one sequence are one kernel, on an emulated machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.kernels.cuda import whole_step as preparing
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.models.families import whole_step
from roseinfer.models.families.llama import FusedLlama
from roseinfer.models.families.whole_step import MegakernelRunner
from tests.kernels.cuda.whole_step.emulated import COMPILER, EmulatedProgram
from tests.models.families import scale_weights_up
from tests.models.fused.test_served import FAR, shortfall

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.kernels.cuda.whole_step import StepSizes

pytestmark = pytest.mark.slow

PROMPT = [7, 3, 90, 12, 5, 44, 2]
PROGRAMS = 3
ROOM = 130 << 10


def network() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=96,
    )  # fmt: skip
    return scale_weights_up(LlamaForCausalLM(config)).to(torch.bfloat16)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EmulatedProgram]:
    """Have the kernel prepared for an emulated GPU; the programs made are noted."""
    made: list[EmulatedProgram] = []

    def load(sizes: StepSizes, _: torch.device) -> EmulatedProgram:
        made.append(EmulatedProgram(sizes, tmp_path))
        return made[-1]

    class Device:
        multi_processor_count = PROGRAMS
        shared_memory_per_block_optin = ROOM

    monkeypatch.setattr(preparing, "device_unsupported_reason", lambda _: "")
    monkeypatch.setattr(preparing.KERNEL, "compile", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device)
    return made


def engine(**settings: Any) -> LLM:
    return LLM(
        network(), device="cpu", fused_model=True, resident_decode=True, run_ahead=0,
        attention_backend="triton", block_size=16, kv_cache_tokens=160, max_batch_size=2,
        **settings,
    )  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which need not be emulated")
def test_tokens_are_the_likeliest(emulated: list[EmulatedProgram]) -> None:
    """Over the end of a block; a step of two sequences takes other kernels."""
    llm = engine(batch_invariant=False)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    first, second = PROMPT * 2, PROMPT[:3]
    for _ in range(2):
        (output,) = llm.generate([first], params)
        assert shortfall(network().float(), first, output.token_ids) < FAR[torch.bfloat16]
    counts = llm.engine.path_counts
    assert counts[EnginePath.MEGAKERNEL] == counts[EnginePath.RESIDENT] > 3
    assert len(emulated) == 1
    before = counts[EnginePath.MEGAKERNEL]
    llm.generate([second, first], params)
    assert counts[EnginePath.RESIDENT] > before == counts[EnginePath.MEGAKERNEL]


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which need not be emulated")
def test_a_long_sequence_leaves_the_kernel(
    emulated: list[EmulatedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens of those that are made are stored while the sequence is short enough."""
    monkeypatch.setattr(FusedLlama, "max_megakernel_tokens", len(PROMPT) + 2)
    llm = engine(batch_invariant=False)
    (output,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert shortfall(network().float(), PROMPT, output.token_ids) < FAR[torch.bfloat16]
    counts = llm.engine.path_counts
    assert (counts[EnginePath.MEGAKERNEL], counts[EnginePath.RESIDENT]) == (2, 5)
    assert len(emulated) == 1


class SeveralKernels:
    """Stands in for the kernel: it computes what several do, and then changes one number."""

    def __init__(self, model: FusedLlama, attention: AttentionBackend, changed: str) -> None:
        self._model, self._attention, self._changed = model, attention, changed

    def logits(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        attention = self._attention
        before, self._model.max_megakernel_tokens = self._model.max_megakernel_tokens, 0
        logits = self._model.logits(tokens, lengths, None, attention)
        self._model.max_megakernel_tokens = before
        if self._changed == "a logit":
            _next_float(logits[0, 5:6])
        if self._changed == "a stored value":
            _, values = attention.kv.caches(1)
            _next_float(values[table[0, -1], 0, int(lengths) % values.shape[2], 3:4])
        return logits


def _next_float(number: Tensor) -> None:
    number.view(torch.int16).add_(1)


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled, and so none runs on a CPU")
@pytest.mark.parametrize("changed", ["nothing", "a logit", "a stored value"])
def test_where_bits_are_those_of_a_batch_another_bit_is_refused(
    monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    llm = engine(batch_invariant=False)
    model = llm.engine.sequence_runner.model
    assert isinstance(model, FusedLlama)
    model.batch_invariant = True
    attended: list[AttentionBackend] = []
    step = MegakernelRunner.logits

    def noting(self: MegakernelRunner, tokens: Tensor, attention: AttentionBackend) -> Any:
        attended.append(attention)
        return step(self, tokens, attention)

    def stand_in(*given: Any) -> SeveralKernels:
        (keys, _), *_ = given[3]
        on = next(each for each in attended if each.kv.caches(0)[0].data_ptr() == keys.data_ptr())
        return SeveralKernels(model, on, changed)

    monkeypatch.setattr(MegakernelRunner, "logits", noting)
    monkeypatch.setattr(whole_step, "prepare_megakernel", stand_in)
    (output,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert shortfall(network().float(), PROMPT, output.token_ids) < FAR[torch.bfloat16]
    assert (llm.engine.path_counts[EnginePath.MEGAKERNEL] > 2) == (changed == "nothing")
