"""``speculation``: tokens a second with drafts and without, of texts that repeat and others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.bench.cases import asked, engine_of_equal_requests
from roseinfer.bench.driving import random_prompts, require_positions
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.report import Report, Table
from roseinfer.bench.timing import synchronizer
from roseinfer.llm import LLM
from roseinfer.models.loading import resolve_device
from roseinfer.models.tiny import byte_tokenizer
from roseinfer.paths import EnginePath
from roseinfer.progress import counted
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_CAPTION = """\
Prompts and texts together, by an engine with speculation="ngram" and one without, which take turns
in one process; medians over the runs. A model that repeats itself has weights of 0 where layers add
to what the token before says, which costs what others cost: its greedy text goes round in circles.
The other draws its tokens. times: tokens a second over those without, in the same run; least: in
the run where that was least. steps: per token of a request. accepted: of the drafts. same: the
share of requests that got the same tokens from both."""
_HOT = 50.0
"""At 1, a large random model has one token far in front of all others, and so repeats itself."""
_ADDS_TO_THE_TOKEN = ("c_proj", "o_proj", "down_proj", "wpe")
"""The modules of GPT-2 and of families like Llama by which a next token depends on others than the
last."""


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    text: str
    tok_per_s: float
    without_tok_per_s: float
    times: float
    least: float
    steps: float
    accepted: float | None
    same_tokens: float


@torch.no_grad()
def repeating(network: Any) -> Any:
    """Make a model's next token depend on the last one alone, so that texts go round."""
    for name, parameter in network.named_parameters():
        if name.split(".")[-2] in _ADDS_TO_THE_TOKEN:
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
    drawn = [
        SamplingParams(
            max_new_tokens=args.max_new_tokens, ignore_eos=True, temperature=_HOT, seed=seed
        )
        for seed in range(args.batch)
    ]
    rows = []
    for text, params in (("repeats itself", [greedy] * args.batch), ("does not", drawn)):
        engines = [_llm(source, args, text == "repeats itself", each) for each in (None, "ngram")]
        rows.append(_measure(text, engines, params, args))
        dtype = engines[0].engine.sessions.model.dtype
    config = {**source.described(dtype), **asked(args)}
    table = Table("speculation", _CAPTION, rows)
    return Report("speculation", args.command, device, config, [table])


def _llm(source: ModelSource, args: argparse.Namespace, repeats: bool, how: str | None) -> LLM:
    network = source.network()
    settings = {**engine_of_equal_requests(args), "speculation": how}
    return LLM(
        repeating(network) if repeats else network,
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
    vocabulary = plain.engine.sessions.model.shape.vocab_size
    prompts = random_prompts(args.batch, args.prompt_tokens, vocabulary)
    pairs = []
    for turn in counted(range(args.warmup_runs + args.repeat_runs), text, "runs"):
        order = (plain, drafted) if turn % 2 else (drafted, plain)
        runs = {id(llm): _run(llm, prompts, params) for llm in order}
        pairs.append((runs[id(plain)], runs[id(drafted)]))
    pairs = pairs[args.warmup_runs :]
    times = [with_drafts.tok_per_s / without.tok_per_s for without, with_drafts in pairs]
    counts = drafted.engine.path_counts
    drafts = counts[EnginePath.DRAFTED]
    without, last = pairs[-1]
    return SpeculationRow(
        text=text,
        tok_per_s=median(each.tok_per_s for _, each in pairs),
        without_tok_per_s=median(each.tok_per_s for each, _ in pairs),
        times=median(times),
        least=min(times),
        steps=last.steps / args.max_new_tokens,
        accepted=counts[EnginePath.ACCEPTED] / drafts if drafts else None,
        same_tokens=sum(map(list.__eq__, without.tokens, last.tokens)) / len(prompts),
    )


def _run(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> _Run:
    engine = llm.engine
    wait = synchronizer(engine.sessions.kv.device)
    wait()
    begin = time.perf_counter()
    requests = [engine.submit(*each) for each in zip(prompts, params, strict=True)]
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    wait()
    return _Run(time.perf_counter() - begin, steps, [request.token_ids for request in requests])
