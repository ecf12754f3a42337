"""Batch invariance: the same bits in any batch, and arithmetic bugs that this detects."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, ConfigError, EnginePath, SamplingParams
from roseinfer.bench.speculation import make_repetitive
from roseinfer.kernels.cuda import decode_attention as cuda_decode_attention
from roseinfer.kernels.cuda import paired, prefill_attention, streamed
from roseinfer.kernels.cuda.decode_attention import RowSizes
from roseinfer.kernels.cuda.paired import PairedSizes
from roseinfer.kernels.cuda.prefill_attention import PromptSizes
from roseinfer.kernels.cuda.streamed import GemmTiles
from roseinfer.kernels.cuda.tensor_maps import supports_wgmma
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.kernels.triton import decode_attention
from roseinfer.models import fused_checks, loading
from roseinfer.sampling import log_probabilities
from tests.engine.repeating_models import draft_counts
from tests.lanes.planted import Planted, module_with
from tests.models.fused import same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, in other orders"
)
MIXES = 25
PART = 128
"""Tokens per part into which attention splits a context."""
EXACT: dict[str, Any] = {"batch_invariant": True, "max_length": 512, "kv_cache_tokens": 4096}
REPEATING = [[7, 3, 90], [12] * 70, [5, 6, 7, 8, 5, 6, 7, 8]]
WITH_LOGPROBS = [
    SamplingParams(
        max_new_tokens=100, ignore_eos=True, logprobs=True, temperature=temperature, seed=seed
    )
    for seed, temperature in enumerate((0.0, 0.0, 0.2))
]


@needs_gpu
@pytest.mark.parametrize("columns", [50_257, 50_304, 32_001])
def test_log_probabilities_are_batch_invariant(columns: int) -> None:
    """Rows with an odd number of columns start at all alignments."""
    torch.manual_seed(0)
    logits = torch.randn(700, columns, device="cuda") * torch.rand(700, 1, device="cuda") * 5
    tokens = torch.randint(columns, (700, 8), device="cuda")
    together = log_probabilities(logits, tokens)
    alone = [
        log_probabilities(*(each[row : row + 1].clone() for each in (logits, tokens)))
        for row in range(700)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_mixes_cross_the_ends_of_tiles_and_parts() -> None:
    lengths = [(len(each.prompt), each.max_new_tokens) for each in same_bits.requests()]
    positions = {
        position
        for size, max_new_tokens in lengths
        for position in range(size, size + max_new_tokens)
    }
    assert positions >= {64, 128, 192, 256, 512}
    assert all(size + max_new_tokens <= same_bits.POSITIONS for size, max_new_tokens in lengths)


@pytest.mark.slow
@pytest.mark.parametrize("kin", ["llama", "gpt2", "mixtral"])
def test_attention_weights_are_spread_over_parts(kin: str) -> None:
    network = same_bits.model_of(kin, "cpu")
    network.set_attn_implementation("eager")
    prompt = max((each.prompt for each in same_bits.requests()), key=len)
    out = network(torch.tensor([prompt]), output_attentions=True)
    for weights in out.attentions:
        parts = [part.float().sum(-1) for part in weights[0, :, -1].split(PART, -1)]
        largest = torch.stack(parts).amax(0)
        assert largest.median() < 0.5, "most sums have a single part"


@needs_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2", "mixtral"])
def test_rows_of_logits_in_mixes_equal_those_alone(device: str, kin: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")
    paths = Counter[str]()
    assert list(same_bits.find_differences(same_bits.model_of(kin), MIXES, 1, paths)) == []
    if supports_wgmma(torch.device("cuda", 0), torch.bfloat16):
        missing = set() if kin == "llama" else {EnginePath.PAIRED_GEMM}  # its MLP is not paired
        assert {path for path in same_bits.SIZED_PATHS if paths[path]} == {
            *same_bits.SIZED_PATHS
        } - missing


@needs_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2", "mixtral"])
def test_two_processes_compute_the_same_bits(device: str, kin: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")
    run = f"from tests.models.fused import same_bits\nprint(same_bits.fingerprint({kin!r}))"
    command = [sys.executable, "-c", run]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (one, _), (other, _) = (process.communicate(timeout=600) for process in runs)
    assert one.strip().isdigit()
    assert one == other


@needs_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2"])
def test_drafts_change_no_token_and_no_logprob(device: str, kin: str) -> None:
    """This holds for sampled requests, too, and for several at once."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    results = []
    for speculation in (None, "ngram"):
        llm = LLM(
            make_repetitive(same_bits.model_of(kin)),
            device=device,
            **EXACT,
            speculation=speculation,
        )
        outputs = llm.generate(REPEATING, WITH_LOGPROBS, progress=False)
        results.append([(each.token_ids, each.logprobs) for each in outputs])
    assert draft_counts(llm)[1] > 100
    assert results[0] == results[1]


PLANTED_BUGS = {
    "a mask one wide": Planted(
        "reads", "k_cache", "chunks", "_chunk_kernel", "seen = distance > 0", "seen = distance > 1"
    ),
    "a dropped tail": Planted(
        "reads",
        "k_cache",
        "attend",
        "_decode_kernel",
        "stored = (tokens >= begin) & (tokens < end)",
        "stored = (tokens >= begin) & (tokens < end - (end % 64 == 63))",
    ),
}
_FUNCTIONS = {
    "a mask one wide": ("prefill_attention", "paged_attention_chunks"),
    "a dropped tail": ("decode_attention", "append_and_attend"),
}
"""The module of each bug, and its function that others call."""


@needs_gpu
@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_planted_arithmetic_bug_is_detected(
    device: str, bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")
    network = same_bits.model_of("llama")
    family, function = _FUNCTIONS[bug]
    buggy = module_with(PLANTED_BUGS[bug], family, tmp_path)
    monkeypatch.setattr(f"roseinfer.kernels.triton.{family}.{function}", getattr(buggy, function))
    assert any(same_bits.find_differences(network, MIXES, 2, Counter()))


WARPGROUP_BUGS: dict[str, tuple[type, str, str]] = {
    "rows: a mask one wide": (RowSizes, "i / 2 % 2 * 8 >= position)", "i / 2 % 2 * 8 > position)"),
    "rows: a dropped tail": (
        RowSizes,
        "i / 2 % 2 * 8 >= position)",
        "i / 2 % 2 * 8 >= position - (position % 64 == 63))",
    ),
    "rows: another order": (
        RowSizes,
        "for (int w = 0; w < computed; w++)",
        "for (int w = computed - 1; w >= 0; w--)",
    ),
    "prompts: a mask one wide": (
        PromptSizes,
        ">= position[i / 2 % 2]",
        "> position[i / 2 % 2]",
    ),
    "prompts: a dropped tail": (
        PromptSizes,
        ">= position[i / 2 % 2]",
        ">= position[i / 2 % 2] - (position[i / 2 % 2] % 64 == 63)",
    ),
    "prompts: another order": (
        PromptSizes,
        "part_ended = i * TILE_T == end;",
        "part_ended = false;",
    ),
    "pairs: another order": (
        PairedSizes,
        "advance_descriptor(rows, k * 32), b = advance_descriptor(weights, k * 32)",
        "advance_descriptor(rows, (k ^ 1) * 32), b = advance_descriptor(weights, (k ^ 1) * 32)",
    ),
    "few rows: another order": (
        GemmTiles,
        "k / 4 * WEIGHTS_BYTES + k % 4 * 32),\n"
        "                    describe_rows(rows + k / 4 * ROWS_BYTES + k % 4 * 32)",
        "k / 4 * WEIGHTS_BYTES + (k ^ 1) % 4 * 32),\n"
        "                    describe_rows(rows + k / 4 * ROWS_BYTES + (k ^ 1) % 4 * 32)",
    ),
}
"""Sizes that a kernel is compiled for, with a text of its source and its replacement."""


@pytest.fixture
def fresh_compilation() -> Iterator[None]:
    kernels = [
        module.KERNEL for module in (cuda_decode_attention, paired, prefill_attention, streamed)
    ]
    for kernel in kernels:
        kernel.load.cache_clear()
    yield
    for kernel in kernels:
        kernel.load.cache_clear()


@needs_gpu
@pytest.mark.usefixtures("fresh_compilation")
@pytest.mark.parametrize("bug", WARPGROUP_BUGS)
def test_planted_warpgroup_bug_is_detected(
    device: str, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks at load, which may detect the bug, too, are disabled."""
    if device != "cuda" or not supports_wgmma(torch.device("cuda", 0), torch.bfloat16):
        pytest.skip("needs a GPU with warpgroups")
    sizes, find, replace = WARPGROUP_BUGS[bug]
    source: Any = sizes.source  # type: ignore[attr-defined]

    def buggy(self: Any, headers: Any = None) -> str:
        text: str = source(self, headers)
        assert text.count(find) == 1
        return text.replace(find, replace)

    monkeypatch.setattr(sizes, "source", buggy)
    for trial in ("is_batch_invariant", "matches_modules"):
        monkeypatch.setattr(loading, trial, lambda *_: True)
    paths = Counter[str]()
    assert any(same_bits.find_differences(same_bits.model_of("llama"), MIXES, 2, paths)), paths


@needs_gpu
def test_other_summation_order_is_detected(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are as accurate; the decode kernel reads half a tile of tokens at a time."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    monkeypatch.setattr(decode_attention, "tile_of_tokens", lambda _: 32)
    assert any(same_bits.find_differences(same_bits.model_of("llama"), MIXES, 3, Counter()))


@needs_gpu
def test_batch_variant_gemms_are_rejected(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")
    network = same_bits.model_of("llama")
    decide: Any = loading._decide_batch_invariance
    llm = LLM(network, device=device, kv_cache_tokens=64)
    assert llm.batch_invariant
    fused = llm.engine.sequence_runner.model
    fused.batch_invariant = False
    assert not fused_checks.is_batch_invariant(fused, 2112), "GEMMs of more than 512 rows differ"
    monkeypatch.setattr(loading, "is_batch_invariant", lambda *_: False)
    with pytest.raises(ConfigError, match="batch_invariant=True: torch's GEMMs"):
        decide(fused, llm.config.__class__(batch_invariant=True))
    with caplog.at_level("WARNING"):
        llm = LLM(network, device=device, kv_cache_tokens=64)
    assert not llm.batch_invariant
    assert "torch's GEMMs" in caplog.text


@pytest.mark.parametrize("setting", [None, False])
def test_reason_for_batch_variance_is_reported(device: str, *, setting: bool | None) -> None:
    options: dict[str, Any] = {"fused_model": False, "batch_invariant": setting}
    llm = LLM("tiny", device=device, kv_cache_tokens=64, **options)
    assert not llm.batch_invariant
    assert "runs on its own modules" in str(llm.batch_variance_reason)


def test_model_without_fused_kernels_rejects_batch_invariance(device: str) -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: GPT2LMHeadModel runs on its own"):
        LLM("tiny", device=device, fused_model=False, batch_invariant=True)


@pytest.mark.skipif(not is_interpreted(), reason="compiled kernels do not run on a CPU")
def test_cpu_rejects_batch_invariance() -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: the kernels have one order"):
        LLM("tiny", device="cpu", fused_model=True, batch_invariant=True)
    assert not LLM("tiny", device="cpu", kv_cache_tokens=64).batch_invariant
