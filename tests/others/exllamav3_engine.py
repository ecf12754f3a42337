"""Adapter of exllamav3's generator: its jobs, page table and recurrent states, without a GPU.

A fake model stores a key per token that depends on all previous keys, as attention finds them by
the block table, and for recurrent layers on a state per job; the next token follows from the key.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

from pytest_roseinfer import EngineAdapter, FastPath
from pytest_roseinfer.engine_capabilities.prefix_reuse import PrefixReuseTraits
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets.partial_import import import_part
from pytest_roseinfer.targets.prefix_keys import argmax_token, key_of
from tests.others.source_repair import Repair, repaired
from tests.others.without_gpu import unpinned

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_roseinfer import RequestMix, Sampling

_INSTALL = "python -m tests.others.fetch exllamav3, and add its folder to PYTHONPATH"
_WITH_PAGES = ("pagetable", "job", "generator")
"""Modules that know the number of tokens per page."""


def _part(name: str) -> Any:
    """Import a part of exllamav3 without its compiled extension, which needs a GPU."""
    if "exllamav3.ext" not in sys.modules:
        extension: Any = ModuleType("exllamav3.ext")
        extension.exllamav3_ext = mock.MagicMock(
            count_match_tensor=_count_match,
            generator_stage_decode=_stage_decode,
            cache_rotate=_rotate,
        )
        sys.modules["exllamav3.ext"] = extension
    return import_part("exllamav3", name, _INSTALL)


# Functions of the extension.


def _count_match(one: torch.Tensor, other: torch.Tensor, most: int) -> int:
    """Return the length of the common prefix of two rows of tokens, of which one has ``most``."""
    length = min(most, other.shape[-1])
    differs = (one[0, :length] != other[0, :length]).nonzero()
    return int(differs[0]) if len(differs) else length


def _stage_decode(
    arena: torch.Tensor,
    width: int,
    tables: Sequence[torch.Tensor],
    positions: Sequence[int],
    _: object,
    batch_ids: torch.Tensor,
    texts: Sequence[torch.Tensor],
    pages: Sequence[torch.Tensor],
    offsets: Sequence[int],
) -> None:
    rows = len(tables)
    block_index = arena[: rows * width].view(rows, width)
    block_index.zero_()
    for row, table in enumerate(tables):
        count = min(table.shape[-1], width)
        block_index[row, :count] = table[0, :count]
    arena[rows * width : rows * width + rows] = torch.tensor(positions)
    for row, (text, page, offset) in enumerate(zip(texts, pages, offsets, strict=True)):
        batch_ids[row, 0] = page[0, offset] = text[0, positions[row]]


def _rotate(cache: torch.Tensor, rotations: torch.Tensor, buffer: torch.Tensor) -> None:
    """Move pages along rotations: pairs of target and source, where -1 is the buffer."""
    moves = rotations.tolist()
    for target, source in zip(moves[::2], moves[1::2], strict=True):
        page = buffer if source < 0 else cache[source]
        (buffer if target < 0 else cache[target]).copy_(page.clone())


# The fake model.


class ExlState:
    """State of one job, with the states before the last tokens of a speculative pass."""

    checkpoint_size = 1

    def __init__(self, cache: ExlCache, value: int = 0, position: int = 0) -> None:
        self.cache, self.value, self.position = cache, value, position
        self.past: list[int] = []
        cache.free_slots -= 1
        if cache.free_slots < 0:
            raise RuntimeError("no free slots for a recurrent state")

    @property
    def last_history(self) -> int:
        return max(0, len(self.past) - 1)

    def rollback_capacity(self) -> int:
        return self.last_history

    def advance(self, tokens: Sequence[int], *, keep: bool) -> list[int]:
        """Return the state after each token, and keep them for ``rewind``."""
        values = []
        for token in tokens:
            self.value = key_of(token, self.value, ())
            values.append(self.value)
        self.past = values if keep else []
        self.position += len(tokens)
        return values

    def rewind(self, count: int) -> None:
        if count:
            self.value = self.past[-1 - count]
            self.position -= count
        self.past = []

    def stash(self) -> dict[str, int]:
        return {"value": self.value, "position": self.position, "checkpoint_size": 1}

    def free(self) -> None:
        self.cache.free_slots += 1


class ExlCache:
    """Cache with a number per token: a key, or for a draft model the token."""

    initialized = True
    recurrent_state_cls = ExlState
    model = SimpleNamespace(loaded_tp=False)

    def __init__(self, pages: int, size: int, slots: int, history: int) -> None:
        self.max_num_tokens, self.num_slots, self.max_history = pages * size, slots, history
        self.pages = torch.full((pages, size), -1)
        self.free_slots = slots

    def reset_states(self) -> None:
        self.free_slots = self.num_slots

    def get_new_state(self) -> ExlState:
        return ExlState(self)

    def new_from_stashed(self, stashed: Mapping[str, int], position: int) -> ExlState:
        return ExlState(self, stashed["value"], position)

    def copy_page(self, source: ExlCache, from_page: int, to_page: int, tokens: int) -> None:
        self.pages[to_page, :tokens] = source.pages[from_page, :tokens]

    def get_all_tensors(self) -> list[torch.Tensor]:
        return [self.pages]


class ExlModel:
    """Fake model, or fake draft model, which is often right."""

    loaded_tp, output_device, logit_layer_idx = False, torch.device("cpu"), 0

    def __init__(self, vocabulary: int, *, recurrent: bool, is_draft: bool) -> None:
        self.config = SimpleNamespace(vocab_size=vocabulary, infer_params=None)
        self.recurrent, self.is_draft = recurrent, is_draft
        self.caps = {"recurrent_states": True} if recurrent and not is_draft else {}
        self.draft_verifier_params: dict[str, Any] = {}

    def get_cache_layers(self) -> list[Any]:
        return []

    def prefetch_tokens(self, _: Sequence[int]) -> None:
        pass

    def prefill(self, input_ids: torch.Tensor, params: Mapping[str, Any]) -> None:
        self.forward(input_ids, params)

    def forward(self, input_ids: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        rows = []
        states = params.get("recurrent_states") or [None] * len(input_ids)
        begins = params["cache_seqlens"].tolist()
        for row, tokens in enumerate(input_ids.tolist()):
            table = params["block_table"][row].tolist()
            run = self._draft if self.is_draft else self._run
            keep = params.get("recurrent_history", False)
            rows.append(run(tokens, begins[row], table, params["cache"].pages, states[row], keep))
        vocabulary = self.config.vocab_size
        chosen = torch.tensor([[argmax_token(key, vocabulary) for key in row] for row in rows])
        return torch.nn.functional.one_hot(chosen, vocabulary).float()

    def _run(
        self,
        tokens: list[int],
        begin: int,
        table: list[int],
        pages: torch.Tensor,
        state: ExlState | None,
        keep: bool,
    ) -> list[int]:
        keys = []
        size = pages.shape[1]
        states = state.advance(tokens, keep=keep) if state else [0] * len(tokens)
        known = [int(pages[table[at // size], at % size]) for at in range(begin)]
        for position, (token, value) in enumerate(zip(tokens, states, strict=True), begin):
            key = key_of(token, position, [value, *known])
            pages[table[position // size], position % size] = key
            known.append(key)
            keys.append(key)
        return keys

    def _draft(
        self,
        tokens: list[int],
        begin: int,
        table: list[int],
        pages: torch.Tensor,
        *_: object,
    ) -> list[int]:
        size = pages.shape[1]
        for position, token in enumerate(tokens, begin):
            pages[table[position // size], position % size] = token
        text = [int(pages[table[at // size], at % size]) for at in range(begin + len(tokens))]
        keys = keys_of(text, recurrent=self.recurrent)[begin:]
        return [key + (key % 3 == 0) for key in keys]


def keys_of(tokens: Sequence[int], *, recurrent: bool) -> list[int]:
    keys: list[int] = []
    state = 0
    for position, token in enumerate(tokens):
        if recurrent:
            state = key_of(token, state, ())
        keys.append(key_of(token, position, [state, *keys]))
    return keys


class _Argmax:
    """Sampler of the most likely token."""

    reqs_past_ids = False

    def forward(self, logits: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return logits[:, -1:].argmax(-1)


_ALONE = "all anew"


class Exllamav3Engine(EngineAdapter):
    """exllamav3's generator, with a fake model."""

    eos_token = 5
    sampling = SamplingTraits(greedy_only=True)
    extra_steps = 8
    prefix_reuse = PrefixReuseTraits(finds="some")
    block_sizes: ClassVar[Sequence[int]] = (4, 2, 3, 8)
    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE),
        "requeued": FastPath(_ALONE, aims=[{"max_rq_pages": 1}]),
        "draft accepted": FastPath(_ALONE, aims=[{"drafts": 2}]),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "recurrent": (False, True),
        "drafts": (0, 2, 3),
        "max_batch_size": (8, 1, 2),
        "max_chunk_pages": (16, 1, 2),
        "prefill_cooldown": (4, 0, 1),
        "max_rq_pages": (None, 1, 2),  # after which a job is queued again
        "checkpoint_pages": (1, 2),  # between two states that are kept
        "states": (64, 2, 1),  # that are kept
        "max_skips": (4, 0),
        "enable_defrag": (True, False),
    }

    def make(self, mix: RequestMix) -> None:
        options, size = mix.options, mix.block_size
        self.size, self.options = size, options
        for name in _WITH_PAGES:
            _part(f"generator.{name}").PAGE_SIZE = size
        _part("cache.recurrent").PAGE_SIZE = size
        drafts, recurrent = options["drafts"], options["recurrent"]
        pages = -(-(mix.cache_tokens + 1 + drafts) // size)
        self.cache = ExlCache(pages, size, options["max_batch_size"], drafts)
        settings: dict[str, Any] = {}
        if drafts:
            settings = {
                "draft_model": ExlModel(self.vocabulary, recurrent=recurrent, is_draft=True),
                "draft_cache": ExlCache(pages, size, 0, drafts),
                "num_draft_tokens": drafts,
            }
        pieces = SimpleNamespace(get_id_to_piece_list=lambda *_: ["x"] * self.vocabulary)
        with self._without_gpu():
            self.generator = _part("generator.generator").Generator(
                ExlModel(self.vocabulary, recurrent=recurrent, is_draft=False),
                self.cache,
                pieces,
                max_batch_size=options["max_batch_size"],
                max_chunk_size=options["max_chunk_pages"] * size,
                prefill_cooldown=options["prefill_cooldown"],
                enable_defrag=options["enable_defrag"],
                recurrent_cache_size=options["states"],
                recurrent_checkpoint_interval=options["checkpoint_pages"] * size,
                recurrent_checkpoint_interval_pp=2 * size,
                **settings,
            )
        self.generated: list[list[int]] = []
        self.jobs: list[Any] = []
        self.ended: set[int] = set()
        self.counts: Counter[str] = Counter()

    @contextmanager
    def _without_gpu(self) -> Iterator[None]:
        modules = [_part(f"generator.{name}") for name in ("job", "generator")]
        with unpinned("empty", "zeros"), mock.patch.object(torch.cuda, "synchronize"):
            for module in modules:
                if hasattr(module, "cuda_sync_active"):
                    module.cuda_sync_active = lambda: None
            yield

    def repairs(self) -> AbstractContextManager[object]:
        """Return a context in which the project's code is repaired."""
        return nullcontext()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        number, most = len(self.jobs), self.options["max_rq_pages"]
        job = _part("generator.job").Job(
            torch.tensor([[*prompt]]),
            max_new_tokens=sampling.max_new_tokens,
            sampler=_Argmax(),
            stop_conditions=None if sampling.ignore_eos else [self.eos_token],
            identifier=number,
            max_rq_tokens=most and most * self.size,
            max_skips=self.options["max_skips"],
        )
        self.jobs.append(job)
        self.generated.append([])
        self.generator.enqueue(job)
        return number

    def step(self) -> None:
        if not self.generator.num_remaining_jobs():
            return
        with self._without_gpu(), self.repairs():
            results = self.generator.iterate()
        for result in results:
            number = result["job"].identifier
            if result["stage"] == "error":
                raise RuntimeError(f"job {number}: {result['error']!r}") from result["error"]
            if "token_ids" in result:
                self.generated[number] += result["token_ids"][0].tolist()
            if result["eos"]:
                self.ended.add(number)
                self.counts["draft accepted"] += result.get("accepted_draft_tokens", 0)
                if result["eos_reason"] == "stop_token":
                    self.generated[number].append(result["eos_triggering_token_id"])
            self.counts["requeued"] += result.get("requeue", False)
            self.counts["prefix hit"] += (
                result["stage"] == "prefill" and self.cached_tokens(number) > 0
            )

    def cancel(self, request: int) -> None:
        if request not in self.ended:
            self.ended.add(request)
            with self._without_gpu(), self.repairs():
                self.generator.cancel(self.jobs[request])

    def tokens(self, request: int) -> list[int]:
        return [*self.generated[request]]

    def is_finished(self, request: int) -> bool:
        return request in self.ended

    def cached_tokens(self, request: int) -> int:
        job = self.jobs[request]
        if job.rq_cached is not None:
            return int(job.rq_cached[1])
        return int(job.cached_pages * self.size + job.cached_tokens)

    def find_leaks(self) -> str:
        held = {
            "pages": len(self.generator.pagetable.referenced_pages),
            "states": self.cache.num_slots - self.cache.free_slots,
            "jobs": self.generator.num_remaining_jobs(),
        }
        return ", ".join(f"{number} {kind}" for kind, number in held.items() if number)

    def path_counts(self) -> Mapping[str, int]:
        return {path: self.counts[path] for path in self.paths}

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        key = keys_of(tokens, recurrent=mix.options["recurrent"])[-1]
        chosen = argmax_token(key, self.vocabulary)
        return [float(token == chosen) for token in range(self.vocabulary)]


# Repairs of known findings, so that a search finds the others.

REPAIRS = {
    "page being prefilled": Repair(
        "generator.job",
        "Job.hash_completed_page",
        "    if new_hash in self.pagetable.referenced_pages:",
        """    other = self.pagetable.referenced_pages.get(new_hash)
    if other is not None and other.kv_position < PAGE_SIZE:
        for cache in filter(None, (self.generator.cache, self.generator.draft_cache)):
            cache.copy_page(cache, page.page_index, other.page_index, PAGE_SIZE)
        other.sequence.copy_(page.sequence)
        other.prev_hash, other.kv_position, other.can_revert = last_hash, PAGE_SIZE, False
    if other is not None:""",
    ),
    "page without link": Repair(
        "generator.job",
        "Job.prefill",
        "                self.cached_pages += 1",
        """                self.cached_pages += 1
                if local_idx + 1 < len(seq.allocated_pages):
                    seq.allocated_pages[local_idx + 1].prev_hash = page.phash""",
    ),
}
"""Repairs by finding."""


class RepairedExllamav3Engine(Exllamav3Engine):
    """exllamav3's generator without its known findings, but for those of ``findings``."""

    findings: ClassVar[Collection[str]] = ()
    """Findings that are not repaired."""

    def repairs(self) -> AbstractContextManager[object]:
        return repaired(_part, REPAIRS, but=self.findings)


class SharesPageInPrefill(RepairedExllamav3Engine):
    findings = ("page being prefilled",)
    max_requests = 6
    block_sizes: ClassVar[Sequence[int]] = (2, 3, 4)
    paths: ClassVar[Mapping[str, FastPath]] = {"prefix hit": FastPath(_ALONE)}
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RepairedExllamav3Engine.option_choices,
        "recurrent": (False,),
        "drafts": (0,),
        "max_batch_size": (8,),
        "max_rq_pages": (None,),
        "enable_defrag": (False,),
    }


class ChecksPages(RepairedExllamav3Engine):
    """Runs the page table's own checks after each step."""

    findings = ("page without link",)
    max_requests = 6
    block_sizes: ClassVar[Sequence[int]] = (2, 3, 4)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RepairedExllamav3Engine.option_choices,
        "recurrent": (False,),
        "drafts": (0,),
        "enable_defrag": (False,),
    }

    def step(self) -> None:
        super().step()
        table = self.generator.pagetable
        table.validate_pagetable(self.generator.active_jobs)
