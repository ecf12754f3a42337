"""``peers``: this engine beside other systems, the same work timed in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.bench import arguments
from roseinfer.bench.equal_requests import asked, engine_of_equal_requests
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.peers.measure_peers import measure, others, tell
from roseinfer.bench.peers.peer_job import PeerJob
from roseinfer.bench.reporting import Report, Table, unavailable_table
from roseinfer.bench.serving.driving import Work, perform, random_prompts, require_positions
from roseinfer.bench.serving.memory_floor import memory_floor
from roseinfer.bench.serving.ways import offline
from roseinfer.how_far import say
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse

    from roseinfer.bench.peers.peer_job import Generate
    from roseinfer.llm import LLM

_PEERS = """\
The same prompts of random tokens on every system, all at once, the likeliest token up to the full
length; no prefix cache. Medians over the repeated runs. prefill ms: for one token each. ms: a step,
the time for all tokens less that for one each, by the tokens between. floors: such a step over the
time to read the weights once, and the keys and values stored in the middle of the run. tok/s: of
the whole run. set-up that a system does in every call counts."""
_HEADINGS = {
    "system": "system",
    "version": "version",
    "prefill_ms": "prefill ms",
    "ms_per_step": "ms",
    "times_floor": "floors",
    "completion_tok_per_s": "tok/s",
}


def run(args: argparse.Namespace) -> Report:
    source = ModelSource.of(args)
    say(f"loading {source.name}")
    llm = source.llm(engine_of_equal_requests(args))
    model = llm.engine.sessions.model
    device, dtype = model.device, model.dtype
    advice = "lower --prompt-tokens or --max-new-tokens"
    require_positions(llm.engine, args.prompt_tokens, args.max_new_tokens, advice)
    prompts = random_prompts(args.batch, args.prompt_tokens, model.shape.vocab_size)
    work = Work(prompts, _greedy(args.max_new_tokens))
    job = PeerJob.of(args, source, work, args.batch)
    floor = memory_floor(source.skeleton(), llm)
    floor_ms = job.floor_ms(floor)
    rows = [measure("roseinfer", None, _ours(llm, job), job, floor_ms)]
    tell(rows[0])
    del llm, model  # the others need the memory
    collect()
    rows += others(arguments.peers_named(args.peers or ()), job, floor_ms)
    return Report(
        "peers",
        args.command,
        device,
        {**source.described(dtype), **asked(args)},
        (
            Table("peers", _PEERS, rows, headings=_HEADINGS),
            unavailable_table((row.system, row.not_available) for row in rows if row.not_available),
        ),
        {"floor_ms": floor_ms, **floor.facts()},
    )


def _ours(llm: LLM, job: PeerJob) -> Generate:
    """Set this engine up as the others are."""
    prompts = tuple(job.prompts)

    def generate(new_tokens: int) -> int:
        record = perform(llm.engine, Work(prompts, _greedy(new_tokens)), offline)
        return sum(map(len, record.token_ids))

    return generate


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
