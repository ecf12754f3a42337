"""Steps replayed from CUDA graphs: they equal plain steps, and capturing changes no sequence."""

from __future__ import annotations

import gc

import pytest
import torch

from roseinfer import EnginePath, SamplingParams
from roseinfer.decode.graphs import StepGraphs, StepKind
from roseinfer.decode.step import RowSteps
from tests.decode.residents import GREEDY, PROMPTS, Decoding, alone
from tests.kv.twins import assert_same_bits, bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
SAMPLED = SamplingParams(temperature=0.8)


@pytest.mark.parametrize("size", range(1, 10))
def test_any_number_of_sequences(device: str, size: int) -> None:
    """Numbers between two step sizes are padded, and padding writes only to the scratch block."""
    decoding = Decoding(device, slots=9, graphs=True)
    kv = decoding.sessions.kv
    prompts = [[at + 1, at + 2] for at in range(size)]
    for prompt in prompts:
        decoding.begin(prompt)
    own_blocks = {block for session, _ in decoding.running for block in session.block_lists[0]}
    for _ in range(2):  # no block is allocated yet
        before = bits(kv.keys).clone()
        decoding.step()
        changed = (bits(kv.keys) != before).any(-1).any(-1).any(-1).any(0).nonzero()
        assert set(changed.flatten().tolist()) <= own_blocks | {0}
    for _ in range(4):
        decoding.step()
    assert decoding.texts() == [alone(device, prompt, 7) for prompt in prompts]
    assert decoding.sessions.path_counts[EnginePath.CUDA_GRAPH] == 6


WITH_PENALTIES = SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5)
WITH_LOGPROBS = SamplingParams(presence_penalty=1.0, top_logprobs=5)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SAMPLED, WITH_PENALTIES, WITH_LOGPROBS],
    ids=["greedy", "sampled", "penalties", "logprobs"],
)
@pytest.mark.parametrize("size", [15, 33, 100, 199, 265, 300])
def test_batch_sizes_with_other_kernels(device: str, size: int, params: SamplingParams) -> None:
    """Attention uses other tiles from 199 sequences of four heads on.

    From 265 on it starts the next kernel later.

    """
    texts = []
    for with_graphs in (True, False):
        decoding = Decoding(device, slots=300, graphs=with_graphs, kernels=with_graphs)
        for at in range(size):
            decoding.begin([at % 90 + 1, at // 90 + 2], params, seed=at)
        for _ in range(6):
            decoding.step()
        texts.append(decoding.texts())
        assert decoding.sessions.path_counts[EnginePath.CUDA_GRAPH] == 6 * with_graphs
    assert texts[0] == texts[1]


def test_garbage_collection_does_not_interrupt_a_capture(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of a deleted engine, for instance, may be collected during a capture."""
    deleted_graphs = [torch.cuda.CUDAGraph()]
    with torch.cuda.graph(deleted_graphs[0]):
        torch.zeros(1, device=device)
    step = RowSteps.step

    def step_with_garbage(self: RowSteps, count: int, kind: StepKind) -> None:
        if torch.cuda.is_current_stream_capturing() and deleted_graphs:
            garbage: list[object] = [deleted_graphs.pop()]
            garbage.append(garbage)
            del garbage
            assert len([[] for _ in range(5000)]) == 5000  # enough to trigger a collection
        step(self, count, kind)

    monkeypatch.setattr(RowSteps, "step", step_with_garbage)
    decoding = Decoding(device, slots=2, graphs=True)
    assert not deleted_graphs
    assert gc.isenabled()
    decoding.begin([1, 2])
    decoding.step()
    assert decoding.sessions.path_counts[EnginePath.CUDA_GRAPH] == 1


@pytest.mark.parametrize("greedy", [True, False])
def test_capture_changes_no_block_of_running_sequences(device: str, greedy: bool) -> None:
    """The sequences continue unaffected."""
    decoding = Decoding(device)
    kv, slots = decoding.sessions.kv, decoding.decode.slots
    for prompt in PROMPTS[:3]:
        decoding.begin(prompt)
    decoding.step()
    before = [bits(cache[:, 1:]).clone() for cache in (kv.keys, kv.values)]
    rows, tokens = slots.rows.tables(6)[0].clone(), slots.rows.tokens.clone()
    counts = decoding.sessions.path_counts.copy()
    graphs = StepGraphs(decoding.decode.steps.step, slots.rows, decoding.sessions.path_counts)
    graphs._compile((1, 3, 6))
    for count in (1, 3, 6):
        graphs._capture(count, StepKind(greedy))
    torch.cuda.synchronize()
    for cache, expected in zip((kv.keys, kv.values), before, strict=True):
        assert_same_bits(cache[:, 1:], expected, "blocks of live sequences")
    assert torch.equal(slots.rows.tables(6)[0], rows)
    assert torch.equal(slots.rows.tokens, tokens)
    assert decoding.sessions.path_counts == counts
    decoding.decode.steps._graphs = graphs
    for _ in range(4):
        decoding.step()
    assert decoding.texts() == [alone(device, prompt, 6) for prompt in PROMPTS[:3]]


def test_other_kinds_of_steps_are_captured_on_demand(device: str) -> None:
    """Capturing them does not change the token counts of running sequences."""
    texts = []
    for graphs in (True, False):
        decoding = Decoding(device, slots=4, graphs=graphs)
        logprobs = []
        decoding.begin(PROMPTS[0])
        decoding.step()
        decoding.begin(PROMPTS[1], WITH_PENALTIES, seed=3)
        decoding.step()
        late = decoding.begin(PROMPTS[2], WITH_LOGPROBS)
        for _ in range(5):
            decoding.step()
            logprobs.append(
                [round(each, 3) for each in decoding.decode.read_back_logprobs().wait()]
            )
        decoding.end(late)
        decoding.begin(PROMPTS[3], WITH_PENALTIES, seed=4)
        for _ in range(4):
            decoding.step()
        texts.append((decoding.texts(), logprobs))
        counts = decoding.sessions.path_counts
        assert counts[EnginePath.CUDA_GRAPH] == graphs * 11
        assert (counts[EnginePath.PENALTIES], counts[EnginePath.LOGPROBS]) == (10, 5)
    assert texts[0] == texts[1]


def test_replay_reads_the_current_rows(device: str) -> None:
    """New blocks, other sequences and other parameters need no new graph."""
    decoding = Decoding(device, slots=4, graphs=True)
    first = decoding.begin(PROMPTS[0])
    decoding.begin(PROMPTS[1], SAMPLED, seed=5)
    for _ in range(3):
        decoding.step()
    decoding.end(first)
    decoding.begin(PROMPTS[2])
    for _ in range(9):
        decoding.step()
    assert decoding.texts()[1] == alone(device, PROMPTS[2], 10)
    plain = Decoding(device, slots=4)
    plain.begin(PROMPTS[1], SAMPLED, seed=5)
    for _ in range(12):
        plain.step()
    assert decoding.texts()[0] == plain.texts()[0]
