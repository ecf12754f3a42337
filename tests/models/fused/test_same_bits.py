"""What a request gets has the same bits in any batch, and bugs in arithmetic are found by that."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, ConfigError, EnginePath, SamplingParams
from roseinfer.bench.speculation import make_repetitive
from roseinfer.kernels.cuda.decode_attention import RowSizes
from roseinfer.kernels.cuda.paired import PairedSizes
from roseinfer.kernels.cuda.prefill_attention import PromptSizes
from roseinfer.kernels.cuda.streamed import GemmTiles
from roseinfer.kernels.cuda.tensor_maps import supports_wgmma
from roseinfer.kernels.cuda.toolchain import compile_and_load
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.kernels.triton import decode_attention
from roseinfer.models import fused_checks, loading
from roseinfer.sampling.logprobs import log_probabilities
from tests.engine.repeating_models import drafted
from tests.lanes.planted import Planted, module_with
from tests.models.fused import same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, in other orders"
)
MIXES = 25
PART = 128
"""Tokens of the first parts that attention cuts a context into."""
EXACT: dict[str, Any] = {"batch_invariant": True, "max_length": 512, "kv_cache_tokens": 4096}
REPEATING = [[7, 3, 90], [12] * 70, [5, 6, 7, 8, 5, 6, 7, 8]]
TOLD = [
    SamplingParams(
        max_new_tokens=100, ignore_eos=True, logprobs=True, temperature=temperature, seed=seed
    )
    for seed, temperature in enumerate((0.0, 0.0, 0.2))
]


@on_a_gpu
@pytest.mark.parametrize("columns", [50_257, 50_304, 32_001])
def test_log_probabilities_do_not_depend_on_the_row(columns: int) -> None:
    """Rows of an odd number of columns begin at all alignments."""
    torch.manual_seed(0)
    logits = torch.randn(700, columns, device="cuda") * torch.rand(700, 1, device="cuda") * 5
    tokens = torch.randint(columns, (700, 8), device="cuda")
    together = log_probabilities(logits, tokens)
    alone = [
        log_probabilities(*(each[row : row + 1].clone() for each in (logits, tokens)))
        for row in range(700)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_mixes_decode_over_the_ends_of_tiles_and_parts() -> None:
    asked = [(len(each.prompt), each.new) for each in same_bits.requests()]
    decoded = {position for size, new in asked for position in range(size, size + new)}
    assert decoded >= {64, 128, 192, 256, 512}
    assert all(size + new <= same_bits.POSITIONS for size, new in asked)


@pytest.mark.parametrize("kin", ["llama", "gpt2", "mixtral"])
def test_attention_of_the_models_is_spread_over_parts(kin: str) -> None:
    network = same_bits.model_of(kin, "cpu")
    network.set_attn_implementation("eager")
    prompt = max((each.prompt for each in same_bits.requests()), key=len)
    out = network(torch.tensor([prompt]), output_attentions=True)
    for weights in out.attentions:
        parts = [part.float().sum(-1) for part in weights[0, :, -1].split(PART, -1)]
        largest = torch.stack(parts).amax(0)
        assert largest.median() < 0.5, "few sums have one part alone in them"


@on_a_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2", "mixtral"])
def test_every_row_of_logits_as_alone(device: str, kin: str) -> None:
    if device != "cuda":
        pytest.skip("this is about a GPU")
    paths = Counter[str]()
    assert list(same_bits.differing(same_bits.model_of(kin), MIXES, 1, paths)) == []
    if supports_wgmma(torch.device("cuda", 0), torch.bfloat16):
        without = set() if kin == "llama" else {EnginePath.PAIRED_GEMM}  # its MLP is none for pairs
        assert {path for path in same_bits.BY_SIZE if paths[path]} == {*same_bits.BY_SIZE} - without


@on_a_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2", "mixtral"])
def test_two_runs(device: str, kin: str) -> None:
    if device != "cuda":
        pytest.skip("this is about a GPU")
    run = f"from tests.models.fused import same_bits\nprint(same_bits.fingerprint({kin!r}))"
    command = [sys.executable, "-c", run]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (one, _), (other, _) = (process.communicate(timeout=100) for process in runs)
    assert one.strip().isdigit()
    assert one == other


@on_a_gpu
@pytest.mark.parametrize("kin", ["llama", "gpt2"])
def test_drafted_texts_and_their_log_probabilities(device: str, kin: str) -> None:
    """This holds for requests that draw, too, and for several at once."""
    if device != "cuda":
        pytest.skip("this is about a GPU")
    told = []
    for speculation in (None, "ngram"):
        llm = LLM(
            make_repetitive(same_bits.model_of(kin)),
            device=device,
            **EXACT,
            speculation=speculation,
        )
        outputs = llm.generate(REPEATING, TOLD, progress=False)
        told.append([(each.token_ids, each.logprobs) for each in outputs])
    assert drafted(llm)[1] > 100
    assert told[0] == told[1]


PLANTED = {
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
    assert any(same_bits.differing(network, MIXES, 2, Counter()))


BY_WARPGROUPS: dict[str, tuple[type, str, str]] = {
    "rows: a mask one wide": (RowSizes, "i / 2 % 2 * 8 >= own)", "i / 2 % 2 * 8 > own)"),
    "rows: a dropped tail": (
        RowSizes,
        "i / 2 % 2 * 8 >= own)",
        "i / 2 % 2 * 8 >= own - (own % 64 == 63))",
    ),
    "rows: another order": (
        RowSizes,
        "for (int w = 0; w < some; w++)",
        "for (int w = some - 1; w >= 0; w--)",
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
    "prompts: another order": (PromptSizes, "ends = i * TILE_T == end;", "ends = false;"),
    "pairs: another order": (
        PairedSizes,
        "further(rows, k * 32), b = further(weights, k * 32)",
        "further(rows, (k ^ 1) * 32), b = further(weights, (k ^ 1) * 32)",
    ),
    "few rows: another order": (
        GemmTiles,
        "k % 4 * 32,\n                                        rows + k / 4 * OF_ROWS + k % 4 * 32",
        "(k ^ 1) % 4 * 32,\n                 rows + k / 4 * OF_ROWS + (k ^ 1) % 4 * 32",
    ),
}
"""What a kernel is compiled for, and what takes the place of something in its source."""


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    compile_and_load.cache_clear()
    yield
    compile_and_load.cache_clear()


@on_a_gpu
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("bug", BY_WARPGROUPS)
def test_wrong_arithmetic_of_warpgroups_is_found(
    device: str, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials that a model is put to when it is loaded, which may find it too, are left out."""
    if device != "cuda" or not supports_wgmma(torch.device("cuda", 0), torch.bfloat16):
        pytest.skip("this is about a GPU with warpgroups")
    sizes, find, replace = BY_WARPGROUPS[bug]
    source: Any = sizes.source  # type: ignore[attr-defined]

    def wrong(self: Any, **given: bool) -> str:
        text: str = source(self, **given)
        assert text.count(find) == 1
        return text.replace(find, replace)

    monkeypatch.setattr(sizes, "source", wrong)
    for trial in ("is_batch_invariant", "matches_modules"):
        monkeypatch.setattr(loading, trial, lambda *_: True)
    paths = Counter[str]()
    assert any(same_bits.differing(same_bits.model_of("llama"), MIXES, 2, paths)), paths


@on_a_gpu
def test_another_order_of_adding_up_is_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are as good; half a tile of tokens goes through the decode kernel at a time."""
    if device != "cuda":
        pytest.skip("this is about a GPU")
    monkeypatch.setattr(decode_attention, "tile_of_tokens", lambda _: 32)
    assert any(same_bits.differing(same_bits.model_of("llama"), MIXES, 3, Counter()))


@on_a_gpu
def test_products_that_depend_on_the_rows_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if device != "cuda":
        pytest.skip("this is about a GPU")
    network = same_bits.model_of("llama")
    settle: Any = loading._decide_batch_invariance
    llm = LLM(network, device=device, kv_cache_tokens=64)
    assert llm.batch_invariant
    fused = llm.engine.sequence_runner.model
    fused.batch_invariant = False
    assert not fused_checks.is_batch_invariant(fused, 2112), "products of more than 512 rows"
    monkeypatch.setattr(loading, "is_batch_invariant", lambda *_: False)
    with pytest.raises(ConfigError, match="batch_invariant=True: torch's GEMMs"):
        settle(fused, llm.config.__class__(batch_invariant=True))
    with caplog.at_level("WARNING"):
        llm = LLM(network, device=device, kv_cache_tokens=64)
    assert not llm.batch_invariant
    assert "torch's GEMMs" in caplog.text


@pytest.mark.parametrize("chosen", [None, False])
def test_a_model_says_why_it_is_not_batch_invariant(device: str, *, chosen: bool | None) -> None:
    options: dict[str, Any] = {"fused_model": False, "batch_invariant": chosen}
    llm = LLM("tiny", device=device, kv_cache_tokens=64, **options)
    assert not llm.batch_invariant
    assert "runs on its own modules" in str(llm.why_batch_variant)


def test_a_model_without_kernels_refuses_it(device: str) -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: GPT2LMHeadModel runs on its own"):
        LLM("tiny", device=device, fused_model=False, batch_invariant=True)


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled, and so none runs on a CPU")
def test_a_cpu_refuses_it() -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: the kernels have one order"):
        LLM("tiny", device="cpu", fused_model=True, batch_invariant=True)
    assert not LLM("tiny", device="cpu", kv_cache_tokens=64).batch_invariant
