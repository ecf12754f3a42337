"""Adapters of mlx-lm's engines on the CPU: its batch generator and its server's serial path.

Both use the server's prompt cache, and small models of mlx-lm with random weights.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from importlib import import_module
from queue import Queue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling

# The models.

VOCABULARY = 32
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
_KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "full": ("qwen3", {}),
    "window": (
        "llama",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "window and itself": ("plamo3", {"window_size": 6, "sliding_window_pattern": 2}),
    "chunks": (
        "llama4",
        {
            "attention_bias": False,
            "attention_chunk_size": 6,
            "interleave_moe_layer_step": 8,
            "intermediate_size_mlp": 32,
            "num_hidden_layers": 4,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": False,
        },
    ),
    "convolution": (
        "lfm2",
        {
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_ff_dim": 32,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1],
        },
    ),
    "mamba": (
        "mamba",
        {
            "state_size": 8,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
        },
    ),
    "delta rule": (
        "olmo_hybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": False,
            "attention_bias": False,
        },
    ),
    "soft cap": (
        "gemma2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "mamba and attention": (
        "nemotron_h",
        {
            "hybrid_override_pattern": ["M", "*"],
            "attention_bias": False,
            "mamba_num_heads": 2,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
        },
    ),
}
"""Family of each kind of model in mlx-lm, and its fields besides those of ``_SHAPE``."""


@lru_cache
def model_of(kind: str, seed: int = 0) -> Any:
    """Return a model whose weights are large, so that each token depends on the earlier ones."""
    mx, utils = import_module("mlx.core"), import_module("mlx.utils")
    family, fields = _KINDS[kind]
    module = import_module(f"mlx_lm.models.{family}")
    config = {"model_type": family, **_SHAPE, **fields}
    args = module.ModelArgs.from_dict({**config, "text_config": config})
    mx.random.seed(seed)
    model = module.Model(args)
    weights = [
        (name, mx.random.normal(weight.shape) * 3 / weight.shape[-1] ** 0.5)
        for name, weight in utils.tree_flatten(model.parameters())
        if weight.ndim > 1 and "A_log" not in name
    ]
    model.update(utils.tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


@lru_cache(maxsize=20_000)
def _logits(kind: str, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the logits after the last token, computed without a cache."""
    mx = import_module("mlx.core")
    return np.array(model_of(kind)(mx.array([tokens]))[0, -1])


# The engines.


class MlxEngine(EngineAdapter):
    """Requests with the server's prompt cache, which both engines share."""

    vocabulary = VOCABULARY
    sampling = SamplingTraits(greedy_only=True)
    block_sizes: ClassVar[Sequence[int]] = (4,)  # it has none
    kinds: ClassVar[Sequence[str]] = ("full", "window", "convolution")
    """Kinds of models, by what their caches keep."""

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()
        cls.option_choices = {**cls.option_choices, "model": cls.kinds}

    def make(self, mix: RequestMix) -> None:
        cache = import_module("mlx_lm.models.cache")
        self.model = model_of(mix.options["model"])
        self.prompts = cache.LRUPromptCache()
        self.counts: Counter[str] = Counter()

    def fetch(self, prompt: Sequence[int]) -> tuple[Any, list[int]]:
        """Return the nearest cache for a prompt, and the prompt's tokens that it lacks."""
        found, rest = self.prompts.fetch_nearest_cache("model", list(prompt))
        self.counts["prefix hit"] += len(rest) < len(prompt)
        return found, rest

    def tokens(self, request: Any) -> list[int]:
        return list(request.tokens)

    def is_finished(self, request: Any) -> bool:
        return bool(request.finished)

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        return _logits(mix.options["model"], tuple(tokens))


_ALONE = "all anew"


class MlxBatchEngine(MlxEngine):
    """``BatchGenerator``, with requests that the server would insert."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE),
        "chunked prefill": FastPath(_ALONE, aims=[{"prefill_step_size": 3}]),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "prefill_step_size": (2048, 3),
        "prefill_batch_size": (8, 1),
        "completion_batch_size": (32, 2),
    }

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        options = {name: value for name, value in mix.options.items() if name != "model"}
        generate = import_module("mlx_lm.generate")
        self.chunk = mix.options["prefill_step_size"]
        self.generator = generate.BatchGenerator(self.model, **options)
        self.requests: dict[int, Any] = {}

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        found, rest = self.fetch(prompt)
        self.counts["chunked prefill"] += len(rest) > self.chunk + 1
        (uid,) = self.generator.insert_segments(
            [[rest]],
            max_tokens=[sampling.max_new_tokens],
            caches=[found],
            all_tokens=[list(prompt[: len(prompt) - len(rest)])],
        )
        self.requests[uid] = SimpleNamespace(uid=uid, tokens=[], finished=False)
        return self.requests[uid]

    def cancel(self, request: Any) -> None:
        if not request.finished:
            self.generator.remove([request.uid])
            request.finished = True

    def step(self) -> None:
        prompts, responses = self.generator.next()
        ends = [each.uid for each in prompts if each.end_of_segment and not each.end_of_prompt]
        for found, tokens in self.generator.extract_cache(ends).values():
            self.prompts.insert_cache("model", tokens[:], found)
        for response in responses:
            request = self.requests[response.uid]
            request.tokens.append(response.token)
            if response.finish_reason:
                request.finished = True
                self.prompts.insert_cache("model", response.all_tokens[:], response.prompt_cache)

    def find_leaks(self) -> str:
        held = self.generator.prompt_cache_nbytes
        return f"{held} bytes of caches" if held else ""


class MlxSerialEngine(MlxEngine):
    """The server's ``_serve_single``, which serves one request at a time, with a draft model."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE),
        "chunked prefill": FastPath(_ALONE, aims=[{"prefill_step_size": 3}]),
        "drafts": FastPath(_ALONE, aims=[{"draft": True}]),
    }
    kinds: ClassVar[Sequence[str]] = ("full", "window")
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "draft": (True, False),
        "prefill_step_size": (2048, 3),
    }

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        server = import_module("mlx_lm.server")
        generate = import_module("mlx_lm.generate")
        self.chunk, self.draft = mix.options["prefill_step_size"], mix.options["draft"]
        self.stream = generate.generation_stream
        self.server = object.__new__(server.ResponseGenerator)
        tokenizer = import_module("mlx_lm.tokenizer_utils").TokenizerWrapper(_tokenizer())
        self.server.model_provider = SimpleNamespace(
            model=self.model,
            draft_model=model_of("full", seed=1) if self.draft else None,
            tokenizer=tokenizer,
            model_key="model",
            cli_args=SimpleNamespace(
                prefill_step_size=self.chunk, kv_bits=None, kv_group_size=64, quantized_kv_start=0
            ),
        )
        self.response = server.Response
        self.server.prompt_cache = self.prompts
        self.server._is_distributed = False
        self.server._log_cache_stats = lambda: None
        self.server._state_machine_cache = {}
        self.server._tokenize = lambda _, request, __: (request.prompt, None, None, "normal", None)
        self.waiting: list[Any] = []

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        request = SimpleNamespace(prompt=list(prompt), tokens=[], finished=False)
        request.max_tokens = sampling.max_new_tokens
        self.waiting.append(request)
        return request

    def cancel(self, request: Any) -> None:
        request.finished = True
        if request in self.waiting:
            self.waiting.remove(request)

    def step(self) -> None:
        if not self.waiting:
            return
        request = self.waiting.pop(0)
        _, rest = self.fetch(request.prompt)
        self.counts["chunked prefill"] += len(rest) > self.chunk + 1
        self.counts["drafts"] += self.draft
        answers: Queue[Any] = Queue()
        self.server._serve_single((answers, request, _arguments(request)), self.stream)
        while not answers.empty():
            answer = answers.get()
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, self.response):
                request.tokens.append(answer.token)
        request.finished = True

    def find_leaks(self) -> str:
        return f"{len(self.waiting)} requests" if self.waiting else ""


def _arguments(request: Any) -> SimpleNamespace:
    """Return what a request's body sets, with the server's defaults and a temperature of 0."""
    sampling = SimpleNamespace(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, xtc_probability=0.0, xtc_threshold=0.0
    )
    logits = SimpleNamespace(
        logit_bias=None,
        repetition_penalty=0.0,
        repetition_context_size=20,
        presence_penalty=0.0,
        presence_context_size=20,
        frequency_penalty=0.0,
        frequency_context_size=20,
    )
    return SimpleNamespace(
        sampling=sampling,
        logits=logits,
        stop_words=[],
        max_tokens=request.max_tokens,
        num_draft_tokens=3,
        top_logprobs=0,
        seed=None,
    )


@lru_cache
def _tokenizer() -> Any:
    """Return a tokenizer whose tokens are their numbers, without an end of texts."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    numbers = {str(token): token for token in range(VOCABULARY)} | {"\n": VOCABULARY}
    words = tokenizers.models.WordLevel(numbers, unk_token="0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
