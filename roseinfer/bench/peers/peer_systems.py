"""How other systems are set up to do a job. Each is a function here, under its name.

None may keep what it stored of a prompt for the next run, which brings the same prompts again.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from roseinfer.bench.arguments import PEERS
from roseinfer.bench.model_source import collect
from roseinfer.bench.timing import synchronizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.bench.peers.peer_job import Generate, PeerJob


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
