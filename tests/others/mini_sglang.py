"""Adapter of mini-sglang's engine: its scheduler, its page tables and its caches, without a GPU.

A fake model stores a key per token that depends on all previous keys, as attention finds them in
the page table; the next token follows from the key.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from contextlib import ExitStack, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

from pytest_roseinfer import EngineAdapter, FastPath
from pytest_roseinfer.engine_capabilities.prefix_reuse import PrefixReuseTraits
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets.partial_import import import_part
from pytest_roseinfer.targets.prefix_keys import argmax_token, key_of, logits_of
from tests.others.without_gpu import unpinned

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pytest_roseinfer import RequestMix, Sampling

_INSTALL = "python -m tests.others.fetch mini-sglang, and add its folder python to PYTHONPATH"


def _part(name: str) -> Any:
    """Import a part of mini-sglang without its kernels, which need a CUDA toolkit."""
    if "minisgl.kernel" not in sys.modules:
        kernels: Any = ModuleType("minisgl.kernel")
        kernels.fast_compare_key = _common_prefix_length
        sys.modules["minisgl.kernel"] = kernels
    return import_part("minisgl", name, _INSTALL)


def _common_prefix_length(one: torch.Tensor, other: torch.Tensor) -> int:
    shorter = min(len(one), len(other))
    differs = (one[:shorter] != other[:shorter]).nonzero()
    return int(differs[0]) if len(differs) else shorter


class _TokenPool:
    """Token pool as the scheduler's forward sees it: what it does is queued on a stream."""

    def __init__(self, tokens: torch.Tensor, stream: deque[Callable[[], None]]) -> None:
        self.tokens, self.stream = tokens, stream

    def __getitem__(self, places: Any) -> list[int]:
        tokens: list[int] = []
        self.stream.append(lambda: tokens.extend(self.tokens[places].tolist()))
        return tokens

    def __setitem__(self, places: Any, new: torch.Tensor) -> None:
        def write() -> None:
            self.tokens[places] = new

        self.stream.append(write)


class MiniSglangWorker:
    """Fake engine: model, sampler, attention backend and stream of its scheduler.

    What is queued on the stream runs when its result is waited for, as CUDA may run it.
    """

    def __init__(self, config: Any, pages: int, vocabulary: int) -> None:
        self.device, self.num_pages, self.tp_cpu_group = torch.device("cpu"), pages, None
        self.vocabulary = vocabulary
        self.max_seq_len = min(config.max_seq_len, pages * config.page_size)
        columns = _part("engine.engine")._align_up_32(self.max_seq_len)
        self.page_table = torch.zeros(config.max_running_req + 1, columns, dtype=torch.int32)
        self.keys = [-1] * (pages * config.page_size)
        self.stream = self.attn_backend = self.graph_runner = self.sampler = self
        self.queue: deque[Callable[[], None]] = deque()
        self.cached: dict[int, int] = {}
        """Tokens of each request that were cached when it began, by its number."""
        self.counts: Counter[str] = Counter()

    def wait_stream(self, _: object) -> None:
        pass

    def prepare(self, _: object) -> None:
        pass

    def pad_batch(self, batch: Any) -> None:
        batch.padded_reqs = batch.reqs

    def prepare_metadata(self, batch: Any) -> None:
        """Copy the slots that each request may read, as the attention backends do."""
        batch.attn_metadata = [
            self.page_table[each.table_idx, : each.device_len].tolist() for each in batch.reqs
        ]

    def forward_batch(self, batch: Any, _: object) -> Any:
        """Queue the forward pass of a batch; return its result, and the event to wait for."""
        begins = [each.cached_len for each in batch.reqs]
        new = torch.zeros(len(batch.reqs), dtype=torch.int32)
        forward = partial(self._forward, batch, begins, new)
        self.queue.append(forward)
        for each in batch.reqs:
            if each.uid not in self.cached:
                self.cached[each.uid] = each.cached_len
                self.counts["prefix hit"] += each.cached_len > 0
            each.complete_one()
        chunked = _part("scheduler.prefill").ChunkedReq
        self.counts["chunked prefill"] += any(isinstance(each, chunked) for each in batch.reqs)
        copied = SimpleNamespace(synchronize=partial(self._run_through, forward))
        return _part("engine").ForwardOutput(new, new, copied)

    def _run_through(self, forward: Callable[[], None]) -> None:
        """Run what is queued up to a forward pass, and until the next one."""
        while forward in self.queue:
            self.queue.popleft()()
        while self.queue and not isinstance(self.queue[0], partial):
            self.queue.popleft()()

    def _forward(self, batch: Any, begins: Sequence[int], new: torch.Tensor) -> None:
        tokens, places = iter(batch.input_ids), iter(batch.out_loc.tolist())
        for row, (begin, slots) in enumerate(zip(begins, batch.attn_metadata, strict=True)):
            for position in range(begin, len(slots)):
                visible = [self.keys[slot] for slot in slots[:position]]
                key = key_of(next(tokens), position, visible)
                self.keys[next(places)] = key
            new[row] = argmax_token(key, self.vocabulary)


class _Request:
    """Request as its client sees it."""

    def __init__(self, uid: int, sampling: Sampling) -> None:
        self.uid, self.sampling = uid, sampling
        self.tokens: list[int] = []
        self.finished = False


_ALONE = "all anew"


class MiniSglangEngine(EngineAdapter):
    """mini-sglang's scheduler, with a fake model; requests get what its server sends them."""

    eos_token = 5
    max_seq_len: ClassVar[int] = 1 << 20
    """Tokens of the longest sequence, one more than its server takes as a prompt."""
    sampling = SamplingTraits(greedy_only=True)
    extra_steps = 2
    prefix_reuse = PrefixReuseTraits(
        finds="full blocks", evicts="least recent", enabled_by={"cache_type": "radix"}
    )
    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE, aims=[{"cache_type": "radix"}]),
        "chunked prefill": FastPath(_ALONE, aims=[{"max_extend_tokens": 3}]),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "cache_type": ("radix", "naive"),
        "overlap": (True, False),
        "max_extend_tokens": (64, 3, 8),
        "max_running_req": (8, 1, 2, 40),
    }

    def make(self, mix: RequestMix) -> None:
        options = dict(mix.options)
        self.overlaps = options.pop("overlap")
        config = SimpleNamespace(page_size=mix.block_size, tp_info=None, **options)
        config.model_path, config.offline_mode = "", True
        config.max_seq_len = self.max_seq_len
        self.worker = MiniSglangWorker(
            config, -(-mix.cache_tokens // mix.block_size), self.vocabulary
        )
        self.requests: list[_Request] = []
        self.messages: list[Any] = []
        self.in_flight: Any = None
        core, distributed = _part("core"), _part("distributed")
        core._GLOBAL_CTX = None
        core.set_global_ctx(core.Context(mix.block_size))
        if distributed.try_get_tp_info() is None:
            distributed.set_tp_info(rank=0, size=1)
        self.scheduler = self._scheduler(config)
        tables = self.scheduler.table_manager
        self.scheduler.token_pool = _TokenPool(tables.token_pool, self.worker.queue)

    def _scheduler(self, config: Any) -> Any:
        module = _part("scheduler.scheduler")

        class Scheduler(module.Scheduler):  # type: ignore[misc, name-defined]
            offline_receive_msg = staticmethod(self._receive)
            offline_send_result = staticmethod(self._send)

        tokenizer = SimpleNamespace(eos_token_id=self.eos_token)
        streams: Any = {"Stream": mock.MagicMock(), "stream": lambda _: nullcontext()}
        streams["set_stream"] = lambda _: None
        with (
            mock.patch.multiple(torch.cuda, **streams),
            mock.patch.object(_part("engine"), "Engine", return_value=self.worker),
            mock.patch.object(module, "load_tokenizer", return_value=tokenizer),
        ):
            return Scheduler(config)

    def _receive(self, blocking: bool) -> list[Any]:  # noqa: ARG002
        messages, self.messages = self.messages, []
        return messages

    def _send(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            request = self.requests[reply.uid]
            if self.receives(request):
                request.tokens.append(reply.next_token)
                request.finished = request.finished or self.is_last(request, reply)

    def receives(self, request: Any) -> bool:
        """Return True for a request that gets further tokens: its server forgets a finished one."""
        return not request.finished

    def is_last(self, request: Any, reply: Any) -> bool:  # noqa: ARG002
        """Return True if this reply, whose token the request has got, is its last."""
        return bool(reply.finished)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        request = _Request(len(self.requests), sampling)
        self.requests.append(request)
        params = _part("core").SamplingParams(
            ignore_eos=sampling.ignore_eos, max_tokens=sampling.max_new_tokens
        )
        tokens = torch.tensor([*prompt], dtype=torch.int32)
        self.messages.append(_part("message").UserMsg(request.uid, tokens, params))
        return request

    def cancel(self, request: Any) -> None:
        if not request.finished:
            self.messages.append(_part("message").AbortBackendMsg(request.uid))
        request.finished = True

    def step(self) -> None:
        with (
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
            unpinned("empty", "tensor"),
        ):
            if self.overlaps:
                self.in_flight = self.scheduler.overlap_loop(self.in_flight)
            else:
                self.scheduler.normal_loop()

    def tokens(self, request: Any) -> list[int]:
        return list(request.tokens)

    def is_finished(self, request: Any) -> bool:
        return bool(request.finished)

    def cached_tokens(self, request: Any) -> int:
        return self.worker.cached.get(request.uid, 0)

    def find_leaks(self) -> str:
        for _ in range(3):  # messages, what is in flight, and rows that are freed late
            self.step()
        manager, tables = self.scheduler.cache_manager, self.scheduler.table_manager
        num_cached = manager.prefix_cache.size_info.total_size // manager.page_size
        held = {
            "locked tokens": manager.prefix_cache.size_info.protected_size,
            "pages": manager.num_pages - len(manager.free_slots) - num_cached,
            "rows": len(self.worker.page_table) - 1 - tables.available_size,
        }
        return ", ".join(f"{count} {name}" for name, count in held.items() if count)

    def path_counts(self) -> Mapping[str, int]:
        return self.worker.counts

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:  # noqa: ARG002
        return logits_of(tokens, self.vocabulary)


# Repairs of known findings, so that a search finds the others.


def _pages(tokens: int, size: int) -> int:
    return -(-tokens // size)


class RepairedMiniSglangEngine(MiniSglangEngine):
    """mini-sglang's scheduler without its known findings, but for those of ``findings``."""

    findings: ClassVar[Collection[str]] = ()
    """Names of the methods of this class that are not applied."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.repairs: list[Any] = []
        self.freed_rows: list[int] = []
        for repair in (
            self.admit_by_pages,
            self.keep_cached_pages,
            self.free_rows_late,
            self.cancel_in_flight,
        ):
            if repair.__name__ not in self.findings:
                repair()

    def step(self) -> None:
        with ExitStack() as repaired:
            for each in self.repairs:
                repaired.enter_context(each())
            freed, self.freed_rows = self.freed_rows, []
            super().step()
            self.scheduler.table_manager._free_slots += freed

    def is_last(self, request: Any, reply: Any) -> bool:
        if "is_last" in self.findings:
            return super().is_last(request, reply)
        sampling = request.sampling
        at_stop = not sampling.ignore_eos and reply.next_token == self.eos_token
        return bool(at_stop or len(request.tokens) == sampling.max_new_tokens)

    def admit_by_pages(self) -> None:
        """Reserve whole pages for requests."""
        adder, decoding = _part("scheduler.prefill").PrefillAdder, _part("scheduler.decode")
        size, add = self.scheduler.cache_manager.page_size, adder._add_one_req

        def add_one(this: Any, *, pending_req: Any, cached_len: int, **rest: Any) -> Any:
            reserved = this.reserved_size
            request = add(this, pending_req=pending_req, cached_len=cached_len, **rest)
            longest = pending_req.input_len + pending_req.output_len
            this.reserved_size = reserved + size * (_pages(longest, size) - cached_len // size)
            return request

        def reserved(this: Any) -> int:
            each = this.running_reqs
            pages = (_pages(r.max_device_len, size) - _pages(r.cached_len, size) for r in each)
            return int(size * sum(pages))

        patch = mock.patch.object
        self.repairs.append(lambda: patch(adder, "_add_one_req", add_one))
        manager = decoding.DecodeManager
        self.repairs.append(lambda: patch(manager, "inflight_tokens", property(reserved)))

    def keep_cached_pages(self) -> None:
        """Read the cached pages of a prefix once one's own copies of them are free."""
        manager = self.scheduler.cache_manager
        cache = manager.cache_req

        def cache_req(request: Any, *, finished: bool) -> None:
            row, free = manager.page_table[request.table_idx], manager._free
            manager._free = lambda indices: free(indices.clone())
            cache(request, finished=finished)
            manager._free = free
            if not finished and (length := request.cache_handle.cached_len):
                row[:length] = request.cache_handle.get_matched_indices()

        manager.cache_req = cache_req

    def free_rows_late(self) -> None:
        """Keep the row of a request for as long as a batch in flight may write to it."""
        self.scheduler.table_manager.free = lambda row: self.freed_rows.append(row)

    def cancel_in_flight(self) -> None:
        """Release a cancelled request that is in flight with the result of its batch."""
        decoding = self.scheduler.decode_manager
        abort = decoding.abort_req

        def abort_req(uid: int) -> Any:
            request = abort(uid)
            if request is None or not self.in_flight:
                return request
            if request not in self.in_flight[0].batch.reqs:
                return request
            request.max_device_len = request.device_len  # it has ended by then
            return None

        decoding.abort_req = abort_req


# Each finding alone.


class AdmitsByTokens(RepairedMiniSglangEngine):
    findings = ("admit_by_pages",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RepairedMiniSglangEngine.option_choices,
        "overlap": (False,),
    }


class ReadsFreedPages(RepairedMiniSglangEngine):
    findings = ("keep_cached_pages",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RepairedMiniSglangEngine.option_choices,
        "overlap": (False,),
    }


class ReusesRows(RepairedMiniSglangEngine):
    findings = ("free_rows_late",)


class CancelsInFlight(RepairedMiniSglangEngine):
    findings = ("cancel_in_flight",)


class EndsEarly(RepairedMiniSglangEngine):
    findings = ("is_last",)


class TakesThreeTokens(RepairedMiniSglangEngine):
    """Takes prompts of at most three tokens."""

    max_seq_len = 4


class HasRowsOf32(RepairedMiniSglangEngine):
    """Has page tables with rows of 32 tokens."""

    max_seq_len = 32


class OfflineMiniSglangEngine(RepairedMiniSglangEngine):
    """Requests get what ``LLM.generate`` collects for them, which cancels none."""

    cancel = EngineAdapter.cancel

    def receives(self, request: Any) -> bool:  # noqa: ARG002
        return True
