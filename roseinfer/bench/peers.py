"""``peers``: this engine beside other systems, the same work timed in the same way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from roseinfer.bench import cases
from roseinfer.bench.cases import PEERS, asked, engine_of_equal_requests, offline
from roseinfer.bench.driving import Work, memory_floor, perform, random_prompts, require_positions
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import synchronizer
from roseinfer.progress import counted, say
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from roseinfer.bench.driving import MemoryFloor, ThroughputRow
    from roseinfer.llm import LLM

if TYPE_CHECKING:
    Generate = Callable[[int], int]


if TYPE_CHECKING:
    "Continues all prompts by so many tokens, and returns how many tokens that made."


# The work that other systems are given, in plain values that another process can be sent.


@dataclass(frozen=True, slots=True)
class PeerJob:
    """Prompts, how far each is continued, and how often."""

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

    @property
    def rounds(self) -> int:
        """How often the slots are filled until all prompts had one."""
        return -(-len(self.prompts) // self.max_batch_size)

    def floor_ms(self, floor: MemoryFloor) -> float:
        """Return the floor of a step in the middle of a run, or of the mean round."""
        stored = sum(len(prompt) + self.max_new_tokens / 2 for prompt in self.prompts)
        return floor.seconds(1, round(stored / self.rounds)) * 1e3


# How other systems are set up to do a job. Each is a function here, under its name.
#
# None may keep what it stored of a prompt for the next run, which brings the same prompts again.


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
    """Run vLLM with its own defaults, but for the prefix cache, on the same weights."""
    module = import_module("vllm")
    name, dtype = _saved(job)
    engine = module.LLM(
        model=name,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=max(map(len, job.prompts)) + job.max_new_tokens,
        max_num_seqs=job.max_batch_size,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job.prompts]

    def generate(new_tokens: int) -> int:
        params = module.SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=new_tokens, detokenize=False
        )
        found = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in found)

    return generate


def sglang(job: PeerJob) -> Generate:
    """Run SGLang with its own defaults, but for the prefix cache, on the same weights."""
    module = import_module("sglang")
    name, dtype = _saved(job)
    engine = module.Engine(
        model_path=name,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_running_requests=job.max_batch_size,
        disable_radix_cache=True,
    )

    def generate(new_tokens: int) -> int:
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new_tokens}
        found = engine.generate(input_ids=job.prompts, sampling_params=params)
        return sum(len(output["output_ids"]) for output in found)

    return generate


def _saved(job: PeerJob) -> tuple[str, str]:
    """Return where the model lies and its dtype, for systems that load it themselves."""
    if not job.source.random_weights:
        return job.source.name, job.source.dtype or "auto"
    network = job.source.network()
    folder, dtype = tempfile.mkdtemp(), str(network.dtype).removeprefix("torch.")
    network.save_pretrained(folder)
    del network
    collect()
    return folder, dtype


SET_UP: dict[str, Callable[[PeerJob], Generate]] = dict(
    zip(PEERS, (transformers_static, transformers_continuous, vllm, sglang), strict=True)
)


# A call in a process of its own; whatever that process started ends with it.


def in_process(work: Callable[..., Any], *arguments: Any, time_limit_s: float) -> Any:
    """Return what ``work`` returns, or a text that says why it does not."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_answer, args=(theirs, folder, work, arguments))
        process.start()
        theirs.close()  # so that its end is seen here
        try:
            if not ours.poll(time_limit_s):
                return f"it took longer than {time_limit_s:g} s"
            return ours.recv()
        except EOFError:
            process.join()
            return f"exit status {process.exitcode}, and it said nothing"
        finally:
            assert process.pid
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _answer(to: Connection, folder: str, work: Callable[..., Any], arguments: Any) -> None:
    os.setpgid(0, 0)
    tempfile.tempdir = folder  # which is removed, however this process ends
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    try:
        to.send(work(*arguments))
    except Exception as error:
        to.send(f"{type(error).__name__}: {error}")


# The times of other systems, each in a process of its own, so that failures stay there.


CAPTION = """\
The same prompts on other systems, all at once, the likeliest token up to the full length;
medians over the repeated runs. prefill ms: for one token each. ms per step: the time for all
tokens less that, by the tokens between; of ours, the median decode step, and prefill ms is all
else. times floor: such a step over the time to read the weights once, and the keys and values
stored in the middle of the run. set-up that a system does in every call counts."""
TIME_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class PeerRow:
    system: str
    version: str | None = None
    total_s: float | None = None
    completion_tok_per_s: float | None = None
    prefill_ms: float | None = None
    ms_per_step: float | None = None
    """None of a single token, or where noise exceeds the steps after the first."""
    times_floor: float | None = None
    not_available: str | None = None


def compare(
    names: Sequence[str], job: PeerJob, ours: ThroughputRow, floor: MemoryFloor
) -> list[PeerRow]:
    """Return our own row, then that of every peer; no rows without peers."""
    if not names:
        return []
    step_ms, floor_ms = ours.decode_step_ms, job.floor_ms(floor)
    own = PeerRow(
        system=f"roseinfer, {ours.run}",
        total_s=ours.total_s,
        completion_tok_per_s=ours.completion_tok_per_s,
        prefill_ms=(ours.total_s - (ours.decode_s or 0)) * 1e3,
        ms_per_step=step_ms,
        times_floor=step_ms / floor_ms if step_ms else None,
    )
    return [own, *others(names, job, floor_ms)]


def others(names: Sequence[str], job: PeerJob, floor_ms: float) -> list[PeerRow]:
    """Return the row of every peer, or the reason why there is nothing in it."""
    rows = []
    for name in counted(names, "other systems", "measured"):
        rows.append(_of(name, job, floor_ms))
        tell(rows[-1])
    return rows


def tell(row: PeerRow) -> None:
    """Say what was measured: who breaks off a long run gets no table."""
    if row.prefill_ms is None:
        say(f"{row.system}: {row.not_available}")
    else:
        step = f"{row.ms_per_step:.3f}" if row.ms_per_step else "?"
        say(f"{row.system}: prefill {row.prefill_ms:.1f} ms, a step {step} ms")


def _of(name: str, job: PeerJob, floor_ms: float) -> PeerRow:
    if find_spec(distribution(name)) is None:
        missing = f"not installed: pip install {distribution(name)}"
        return PeerRow(name, not_available=missing)
    found = in_process(measure_peer, name, job, floor_ms, time_limit_s=TIME_LIMIT_S)
    return found if isinstance(found, PeerRow) else PeerRow(name, not_available=found)


def distribution(name: str) -> str:
    return name.partition("-")[0]


def measure_peer(name: str, job: PeerJob, floor_ms: float) -> PeerRow:
    version = metadata.version(distribution(name))
    return measure(name, version, SET_UP[name](job), job, floor_ms)


def measure(
    system: str, version: str | None, generate: Generate, job: PeerJob, floor_ms: float
) -> PeerRow:
    new = job.max_new_tokens
    total_s = _median_s(generate, new, job, job.warmup_runs)
    first_s = _median_s(generate, 1, job, 1) if new > 1 else total_s
    step_ms = (total_s - first_s) * 1e3 / ((new - 1) * job.rounds) if new > 1 else 0.0
    measured = step_ms > 0
    return PeerRow(
        system=system,
        version=version,
        total_s=total_s,
        completion_tok_per_s=len(job.prompts) * new / total_s,
        prefill_ms=first_s * 1e3,
        ms_per_step=step_ms if measured else None,
        times_floor=step_ms / floor_ms if measured else None,
    )


def _median_s(generate: Generate, new_tokens: int, job: PeerJob, warmup_runs: int) -> float:
    runs = [_seconds(generate, new_tokens, job) for _ in range(warmup_runs + job.repeat_runs)]
    return median(runs[warmup_runs:])


def _seconds(generate: Generate, new_tokens: int, job: PeerJob) -> float:
    begin = time.perf_counter()
    made = generate(new_tokens)
    elapsed = time.perf_counter() - begin
    if made != (wanted := len(job.prompts) * new_tokens):
        raise RuntimeError(f"it made {made} tokens of {wanted}")
    return elapsed


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
    rows += others(cases.peers_named(args.peers or ()), job, floor_ms)
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
