"""The same work on other systems, each in a process of its own, so that failures stay there."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from importlib import import_module, metadata
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from roseinfer.bench.arguments import PEERS
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.serving.isolation import in_process
from roseinfer.bench.timing import synchronizer
from roseinfer.how_far import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from roseinfer.bench.serving.driving import Work
    from roseinfer.bench.serving.figures import ThroughputRow

    Generate = Callable[[int], int]
    """Continues all prompts by so many tokens, and returns how many tokens that made."""

CAPTION = """\
The same prompts on other systems, all at once, the likeliest token up to the full length;
medians over the repeated runs. ms per step: of theirs, the time for all tokens less that for
one token each, by the tokens between; of ours, the median decode step. set-up that a system
does in every call counts."""
TIME_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class PeerJob:
    """The work, in plain values that another process can be sent."""

    source: ModelSource
    prompts: list[list[int]]
    max_new_tokens: int
    max_batch_size: int
    warmup_runs: int
    repeat_runs: int

    @classmethod
    def of(cls, args: argparse.Namespace, source: ModelSource, work: Work, slots: int) -> PeerJob:
        """``work`` has prompts of tokens."""
        prompts = [[int(token) for token in prompt] for prompt in work.prompts]
        new = work.params.max_new_tokens
        return cls(source, prompts, new, slots, args.warmup_runs, args.repeat_runs)


@dataclass(frozen=True, slots=True)
class PeerRow:
    system: str
    version: str | None = None
    total_s: float | None = None
    completion_tok_per_s: float | None = None
    ms_per_step: float | None = None
    not_available: str | None = None


def compare(names: Sequence[str], job: PeerJob, ours: ThroughputRow) -> list[PeerRow]:
    """Return our own row, then that of every peer; no rows without peers."""
    if not names:
        return []
    figures = (ours.total_s, ours.completion_tok_per_s, ours.decode_step_ms)
    rows = [PeerRow(f"roseinfer, {ours.run}", None, *figures)]
    for name in counted(names, "other systems", "measured"):
        found = in_process(measure, name, job, time_limit_s=TIME_LIMIT_S)
        rows.append(found if isinstance(found, PeerRow) else PeerRow(name, not_available=found))
    return rows


def transformers_static(job: PeerJob) -> Generate:
    """Run ``generate`` on as many prompts at a time as the engine has slots."""
    from transformers import GenerationConfig

    network, size = job.source.network(), job.max_batch_size
    network.generation_config.eos_token_id = None  # or it would end there
    slices = (job.prompts[at : at + size] for at in range(0, len(job.prompts), size))
    batches = [_padded(prompts, network.device) for prompts in slices]
    wait = synchronizer(network.device)

    def generate(new_tokens: int) -> int:
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
        )
        made = 0
        for ids, mask in batches:
            found = network.generate(ids, attention_mask=mask, generation_config=config)
            made += (found.shape[1] - ids.shape[1]) * len(found)
        wait()
        return made

    return generate


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, with each prompt at the right end of its row."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    masks = [torch.ones_like(row) for row in rows]
    ids, mask = (
        pad_sequence(each, batch_first=True, padding_side="left") for each in (rows, masks)
    )
    return ids, mask


def transformers_continuous(job: PeerJob) -> Generate:
    """Run ``generate_batch``, which sets itself up anew in every call."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    network = job.source.network()
    batching = ContinuousBatchingConfig(max_requests_per_batch=job.max_batch_size)

    def generate(new_tokens: int) -> int:
        config = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        found = network.generate_batch(
            job.prompts, generation_config=config, continuous_batching_config=batching
        )
        return sum(len(output.generated_tokens) for output in found.values())

    return generate


def vllm(job: PeerJob) -> Generate:
    """Run vLLM with its own defaults, on the same weights."""
    module = import_module("vllm")
    name, dtype = job.source.name, job.source.dtype or "auto"
    if job.source.random_weights:
        network = job.source.network()
        name, dtype = tempfile.mkdtemp(), str(network.dtype).removeprefix("torch.")
        network.save_pretrained(name)
        del network
        collect()
    engine = module.LLM(
        model=name,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=max(map(len, job.prompts)) + job.max_new_tokens,
        max_num_seqs=job.max_batch_size,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job.prompts]

    def generate(new_tokens: int) -> int:
        params = module.SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=new_tokens, detokenize=False
        )
        found = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in found)

    return generate


_SET_UP: dict[str, Callable[[PeerJob], Generate]] = dict(
    zip(PEERS, (transformers_static, transformers_continuous, vllm), strict=True)
)


def measure(name: str, job: PeerJob) -> PeerRow:
    generate = _SET_UP[name](job)
    new = job.max_new_tokens
    total_s = [_seconds(generate, new, job) for _ in range(job.warmup_runs + job.repeat_runs)]
    taken = median(total_s[job.warmup_runs :])
    speed = len(job.prompts) * new / taken
    version = metadata.version(name.partition("-")[0])
    return PeerRow(name, version, taken, speed, _ms_per_step(generate, taken, job))


def _ms_per_step(generate: Generate, total_s: float, job: PeerJob) -> float | None:
    """Return the mean over the steps after the first, or None if noise exceeds it."""
    if job.max_new_tokens == 1:
        return None
    _seconds(generate, 1, job)
    first_s = median(_seconds(generate, 1, job) for _ in range(job.repeat_runs))
    rounds = -(-len(job.prompts) // job.max_batch_size)
    step_s = (total_s - first_s) / (job.max_new_tokens - 1) / rounds
    return step_s * 1e3 if step_s > 0 else None


def _seconds(generate: Generate, new_tokens: int, job: PeerJob) -> float:
    begin = time.perf_counter()
    made = generate(new_tokens)
    elapsed = time.perf_counter() - begin
    if made != (wanted := len(job.prompts) * new_tokens):
        raise RuntimeError(f"it made {made} tokens of {wanted}")
    return elapsed
