"""``peers``: a comparison with other systems, on the same work and with the same timing."""

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
from roseinfer.bench.cases import PEERS, equal_requests_config, offline, workload_config
from roseinfer.bench.driver import (
    Workload,
    memory_floor,
    random_prompts,
    require_positions,
    run_workload,
)
from roseinfer.bench.model_source import ModelSource, free_memory
from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import synchronizer
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import print_status, track_items

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from roseinfer.bench.driver import MemoryFloor, ThroughputRow
    from roseinfer.llm import LLM

    Generate = Callable[[int], int]
    """Function that generates so many tokens for each prompt, and returns the number of all."""


# Work for other systems, as plain values that can be pickled for another process.


@dataclass(frozen=True, slots=True)
class PeerJob:
    """Prompts, new tokens per prompt, batch size, and numbers of runs."""

    source: ModelSource
    prompts: list[list[int]]
    max_new_tokens: int
    max_batch_size: int
    warmup_runs: int
    repeat_runs: int

    @classmethod
    def of(
        cls, args: argparse.Namespace, source: ModelSource, work: Workload, slots: int
    ) -> PeerJob:
        """Return the job of a workload, whose prompts are token ids."""
        prompts = [[int(token) for token in prompt] for prompt in work.prompts]
        new = work.params.max_new_tokens
        return cls(source, prompts, new, slots, args.warmup_runs, args.repeat_runs)

    @property
    def rounds(self) -> int:
        """Number of full batches that hold all prompts."""
        return -(-len(self.prompts) // self.max_batch_size)

    def floor_ms(self, floor: MemoryFloor) -> float:
        """Return the floor in ms of a step in the middle of a run, as a mean over its rounds."""
        stored = sum(len(prompt) + self.max_new_tokens / 2 for prompt in self.prompts)
        return floor.seconds(1, round(stored / self.rounds)) * 1e3


# Set-up of other systems for a job: one function per system.
#
# None may use a prefix cache, since all runs have the same prompts.


def transformers_static(job: PeerJob) -> Generate:
    """Run ``generate`` on as many prompts at a time as the engine has slots."""
    from transformers import GenerationConfig

    network, size = job.source.network(), job.max_batch_size
    network.generation_config.eos_token_id = None  # never stop at EOS
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
        num_tokens = 0
        for ids, mask in batches:
            outputs = network.generate(ids, attention_mask=mask, generation_config=config)
            num_tokens += (outputs.shape[1] - ids.shape[1]) * len(outputs)
        wait()
        return num_tokens

    return generate


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of prompts with padding on the left."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    masks = [torch.ones_like(row) for row in rows]
    ids, mask = (
        pad_sequence(each, batch_first=True, padding_side="left") for each in (rows, masks)
    )
    return ids, mask


def transformers_continuous(job: PeerJob) -> Generate:
    """Run ``generate_batch``, which repeats its set-up in every call."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    network = job.source.network()
    batching = ContinuousBatchingConfig(max_requests_per_batch=job.max_batch_size)

    def generate(new_tokens: int) -> int:
        config = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = network.generate_batch(
            job.prompts, generation_config=config, continuous_batching_config=batching
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    return generate


def vllm(job: PeerJob) -> Generate:
    """Run vLLM on the same weights with its defaults, but without prefix cache."""
    module = import_module("vllm")
    name, dtype = _local_model(job)
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
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def sglang(job: PeerJob) -> Generate:
    """Run SGLang on the same weights with its defaults, but without prefix cache."""
    module = import_module("sglang")
    name, dtype = _local_model(job)
    engine = module.Engine(
        model_path=name,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_running_requests=job.max_batch_size,
        disable_radix_cache=True,
    )

    def generate(new_tokens: int) -> int:
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new_tokens}
        outputs = engine.generate(input_ids=job.prompts, sampling_params=params)
        return sum(len(output["output_ids"]) for output in outputs)

    return generate


def _local_model(job: PeerJob) -> tuple[str, str]:
    """Return the model's path or name and its dtype, for systems that load it themselves."""
    if not job.source.random_weights:
        return job.source.name, job.source.dtype or "auto"
    network = job.source.network()
    folder, dtype = tempfile.mkdtemp(), str(network.dtype).removeprefix("torch.")
    network.save_pretrained(folder)
    del network
    free_memory()
    return folder, dtype


PEER_SETUPS: dict[str, Callable[[PeerJob], Generate]] = dict(
    zip(PEERS, (transformers_static, transformers_continuous, vllm, sglang), strict=True)
)


# A call in a subprocess, which ends together with all processes that it started.


def run_in_subprocess(work: Callable[..., Any], *arguments: Any, time_limit_s: float) -> Any:
    """Return the result of ``work`` in a subprocess, or the reason of its failure as a string."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_send_result, args=(sender, folder, work, arguments))
        process.start()
        sender.close()  # else the end of the process is not noticed
        try:
            if not receiver.poll(time_limit_s):
                return f"timed out after {time_limit_s:g} s"
            return receiver.recv()
        except EOFError:
            process.join()
            return f"exit status {process.exitcode}, without an error message"
        finally:
            assert process.pid
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _send_result(link: Connection, folder: str, work: Callable[..., Any], arguments: Any) -> None:
    os.setpgid(0, 0)
    tempfile.tempdir = folder  # the parent removes it, however this process ends
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(devnull, stream)
    try:
        link.send(work(*arguments))
    except Exception as error:
        link.send(f"{type(error).__name__}: {error}")


# Times of other systems, each measured in a subprocess, so that failures do not spread.


CAPTION = """\
The same prompts on other systems, all at once, greedy up to the full length; medians over the
repeated runs. prefill ms: one token per prompt. ms per step: the time for all tokens less that for
one each, per token between them; for roseinfer, the median decode step, and prefill ms is the rest.
floor ratio: such a step over the time to read the weights once, and the keys and values stored in
the middle of the run. Set-up that a system repeats in every call is included."""
TIME_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Times of one system."""

    system: str
    version: str | None = None
    total_s: float | None = None
    completion_tok_per_s: float | None = None
    prefill_ms: float | None = None
    ms_per_step: float | None = None
    """Milliseconds per decode step; None for a single token, or if noise exceeds the difference."""
    floor_ratio: float | None = None
    not_available: str | None = None


def compare(
    names: Sequence[str], job: PeerJob, our_row: ThroughputRow, floor: MemoryFloor
) -> list[PeerRow]:
    """Return the row of roseinfer, then that of every peer; no rows without peers."""
    if not names:
        return []
    step_ms, floor_ms = our_row.decode_step_ms, job.floor_ms(floor)
    own_row = PeerRow(
        system=f"roseinfer, {our_row.run}",
        total_s=our_row.total_s,
        completion_tok_per_s=our_row.completion_tok_per_s,
        prefill_ms=(our_row.total_s - (our_row.decode_s or 0)) * 1e3,
        ms_per_step=step_ms,
        floor_ratio=step_ms / floor_ms if step_ms else None,
    )
    return [own_row, *measure_peers(names, job, floor_ms)]


def measure_peers(names: Sequence[str], job: PeerJob, floor_ms: float) -> list[PeerRow]:
    """Return the row of every peer, with times or the reason why it is not available."""
    rows = []
    for name in track_items(names, "other systems", "measured"):
        rows.append(_measure_or_skip(name, job, floor_ms))
        announce_row(rows[-1])
    return rows


def announce_row(row: PeerRow) -> None:
    """Print the row's times: an interrupted run prints no table."""
    if row.prefill_ms is None:
        print_status(f"{row.system}: {row.not_available}")
    else:
        step = f"{row.ms_per_step:.3f}" if row.ms_per_step else "?"
        print_status(f"{row.system}: prefill {row.prefill_ms:.1f} ms, a step {step} ms")


def _measure_or_skip(name: str, job: PeerJob, floor_ms: float) -> PeerRow:
    if find_spec(distribution(name)) is None:
        missing = f"not installed: pip install {distribution(name)}"
        return PeerRow(name, not_available=missing)
    result = run_in_subprocess(measure_peer, name, job, floor_ms, time_limit_s=TIME_LIMIT_S)
    return result if isinstance(result, PeerRow) else PeerRow(name, not_available=result)


def distribution(name: str) -> str:
    return name.partition("-")[0]


def measure_peer(name: str, job: PeerJob, floor_ms: float) -> PeerRow:
    version = metadata.version(distribution(name))
    return measure(name, version, PEER_SETUPS[name](job), job, floor_ms)


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
        floor_ratio=step_ms / floor_ms if measured else None,
    )


def _median_s(generate: Generate, new_tokens: int, job: PeerJob, warmup_runs: int) -> float:
    runs = [_seconds(generate, new_tokens, job) for _ in range(warmup_runs + job.repeat_runs)]
    return median(runs[warmup_runs:])


def _seconds(generate: Generate, new_tokens: int, job: PeerJob) -> float:
    begin = time.perf_counter()
    num_tokens = generate(new_tokens)
    elapsed = time.perf_counter() - begin
    if num_tokens != (expected := len(job.prompts) * new_tokens):
        raise RuntimeError(f"expected {expected} tokens, actual {num_tokens}")
    return elapsed


_PEERS = """\
The same prompts of random tokens on every system, all at once, greedy up to the full length,
without prefix cache. Medians over the repeated runs. prefill ms: one token per prompt. ms: a decode
step: the time for all tokens less that for one each, per token between them. floors: such a step
over the time to read the weights once, and the keys and values stored in the middle of the run.
tok/s: of the whole run. Set-up that a system repeats in every call is included."""
_HEADINGS = {
    "system": "system",
    "version": "version",
    "prefill_ms": "prefill ms",
    "ms_per_step": "ms",
    "floor_ratio": "floors",
    "completion_tok_per_s": "tok/s",
}


def run(args: argparse.Namespace) -> Report:
    source = ModelSource.of(args)
    print_status(f"loading {source.name}")
    llm = source.llm(equal_requests_config(args))
    model = llm.engine.sequence_runner.model
    device, dtype = model.device, model.dtype
    advice = "lower --prompt-tokens or --max-new-tokens"
    require_positions(llm.engine, args.prompt_tokens, args.max_new_tokens, advice)
    prompts = random_prompts(args.batch, args.prompt_tokens, model.shape.vocab_size)
    work = Workload(prompts, _greedy(args.max_new_tokens))
    job = PeerJob.of(args, source, work, args.batch)
    floor = memory_floor(source.skeleton(), llm)
    floor_ms = job.floor_ms(floor)
    rows = [measure("roseinfer", None, _setup_own_engine(llm, job), job, floor_ms)]
    announce_row(rows[0])
    del llm, model  # the other systems need the memory
    free_memory()
    rows += measure_peers(cases.validate_peers(args.peers or ()), job, floor_ms)
    return Report(
        "peers",
        args.command,
        device,
        {**source.describe(dtype), **workload_config(args)},
        (
            Table("peers", _PEERS, rows, headings=_HEADINGS),
            unavailable_table((row.system, row.not_available) for row in rows if row.not_available),
        ),
        {"floor_ms": floor_ms, **floor.facts()},
    )


def _setup_own_engine(llm: LLM, job: PeerJob) -> Generate:
    """Return this engine's function for a job, like those of the other systems."""
    prompts = tuple(job.prompts)

    def generate(new_tokens: int) -> int:
        record = run_workload(llm.engine, Workload(prompts, _greedy(new_tokens)), offline)
        return sum(map(len, record.token_ids))

    return generate


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
