"""``speculation``: decoding with and without drafts, for repetitive and for random output."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.bench.cases import equal_requests_config, workload_config
from roseinfer.bench.driver import random_prompts, require_positions
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.report import Report, Table
from roseinfer.bench.timing import synchronizer
from roseinfer.llm import LLM
from roseinfer.models.loading import resolve_device
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.paths import EnginePath
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import track_items

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_CAPTION = """\
Prefill and decode together, by an engine with speculation="ngram" and one without (baseline), which
alternate in one process; medians over the runs. The repetitive model has zero weights in the
modules that add to the last token's embedding, at the same cost per step: its greedy output is
periodic. The other one samples its tokens. speedup: tokens per second over the baseline, in the
same run; min speedup: the least of all runs. steps: per token of a request. accepted: fraction of
the draft tokens. same tokens: share of the requests with equal tokens from both engines."""
_HIGH_TEMPERATURE = 50.0
"""Temperature of the random output. At 1, a large random model has one token of far higher
probability than all others, and so repeats itself."""
_RESIDUAL_MODULES = ("c_proj", "o_proj", "down_proj", "wpe")
"""Modules of GPT-2 and of Llama-like families that make the next token depend on more than the last
one."""


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """Speed with drafts compared with the baseline, for one kind of output."""

    text: str
    tok_per_s: float
    baseline_tok_per_s: float
    speedup: float
    min_speedup: float
    steps: float
    accepted: float | None
    same_tokens: float


@torch.no_grad()
def make_repetitive(network: Any) -> Any:
    """Make a model's next token depend on the last one alone, so that its output is periodic."""
    for name, parameter in network.named_parameters():
        if name.split(".")[-2] in _RESIDUAL_MODULES:
            parameter.zero_()
    return network


@dataclass(slots=True)
class _Run:
    seconds: float
    steps: int
    tokens: list[list[int]]

    @property
    def tok_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def run(args: argparse.Namespace) -> Report:
    source = ModelSource.of(args)
    device = resolve_device(args.device)
    greedy = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    sampled = [
        SamplingParams(
            max_new_tokens=args.max_new_tokens,
            ignore_eos=True,
            temperature=_HIGH_TEMPERATURE,
            seed=seed,
        )
        for seed in range(args.batch)
    ]
    rows = []
    for text, params in (("repeats itself", [greedy] * args.batch), ("does not", sampled)):
        engines = [_llm(source, args, text == "repeats itself", each) for each in (None, "ngram")]
        rows.append(_measure(text, engines, params, args))
        dtype = engines[0].engine.sequence_runner.model.dtype
    config = {**source.describe(dtype), **workload_config(args)}
    table = Table("speculation", _CAPTION, rows)
    return Report("speculation", args.command, device, config, [table])


def _llm(
    source: ModelSource, args: argparse.Namespace, repetitive: bool, speculation: str | None
) -> LLM:
    network = source.network()
    settings = {**equal_requests_config(args), "speculation": speculation}
    return LLM(
        make_repetitive(network) if repetitive else network,
        tokenizer=byte_tokenizer(network.config.vocab_size),
        device=args.device,
        **settings,
    )


def _measure(
    text: str, engines: Sequence[LLM], params: Sequence[SamplingParams], args: argparse.Namespace
) -> SpeculationRow:
    plain, drafted = engines
    advice = "lower --prompt-tokens or --max-new-tokens"
    require_positions(plain.engine, args.prompt_tokens, args.max_new_tokens, advice)
    vocabulary = plain.engine.sequence_runner.model.shape.vocab_size
    prompts = random_prompts(args.batch, args.prompt_tokens, vocabulary)
    pairs = []
    for turn in track_items(range(args.warmup_runs + args.repeat_runs), text, "runs"):
        order = (plain, drafted) if turn % 2 else (drafted, plain)
        runs = {id(llm): _run(llm, prompts, params) for llm in order}
        pairs.append((runs[id(plain)], runs[id(drafted)]))
    pairs = pairs[args.warmup_runs :]
    speedups = [with_drafts.tok_per_s / without.tok_per_s for without, with_drafts in pairs]
    counts = drafted.engine.path_counts
    drafts = counts[EnginePath.DRAFTED]
    without, last = pairs[-1]
    return SpeculationRow(
        text=text,
        tok_per_s=median(each.tok_per_s for _, each in pairs),
        baseline_tok_per_s=median(each.tok_per_s for each, _ in pairs),
        speedup=median(speedups),
        min_speedup=min(speedups),
        steps=last.steps / args.max_new_tokens,
        accepted=counts[EnginePath.ACCEPTED] / drafts if drafts else None,
        same_tokens=sum(map(list.__eq__, without.tokens, last.tokens)) / len(prompts),
    )


def _run(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> _Run:
    engine = llm.engine
    wait = synchronizer(engine.sequence_runner.kv.device)
    wait()
    begin = time.perf_counter()
    requests = [engine.submit(*each) for each in zip(prompts, params, strict=True)]
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    wait()
    return _Run(time.perf_counter() - begin, steps, [request.token_ids for request in requests])
