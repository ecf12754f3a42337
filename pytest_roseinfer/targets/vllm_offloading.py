"""Adapter of vLLM's offloading manager (V1): a tier in host memory below its block manager.

The manager is called as by vLLM's ``OffloadingConnectorScheduler``: blocks are stored when they are
full, a request loads what it finds after its cached prefix, and a store of a block that is to be
written again is waited for. The connector itself supports no transfer that fails; the manager does,
and its callers among vLLM's further tiers use that.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import CacheSpec, Transfer
from pytest_roseinfer.capabilities.tiers import TierTraits
from pytest_roseinfer.targets.block_manager import BlockStore
from pytest_roseinfer.targets.vllm_kv import VllmAdapter, vllm_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import TransferResult


@dataclass(slots=True)
class Job:
    """A transfer in flight."""

    request: Any
    keys: list[bytes]
    blocks: list[int]
    chunks: list[int]
    """Places in host memory."""
    seq: int | None = None
    """Sequence that waits for a load; None for a store, and once the sequence is freed."""
    ready: int | None = None
    """Tokens of the request before a load; None for a store."""
    prefix: Any = None
    """Result of the lookup that a load is for."""


class OffloadingVllmAdapter(VllmAdapter):
    """Adapter with full attention in all layers, and host memory for a few blocks."""

    CHUNKS: ClassVar[int] = 6
    atomic_batches = True
    tiers = TierTraits(holds_blocks=False, keeps=CHUNKS)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"policy": ("lru", "arc")}
    reset = KVCacheAdapter.reset  # not offered: vLLM refuses it under the load of a freed request
    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)

    def manage(self, spec: CacheSpec) -> None:
        super().manage(spec)
        manager = vllm_part("v1.kv_offload.cpu.manager").CPUOffloadingManager
        self.offloading = manager(self.CHUNKS, cache_policy=spec.options["policy"])
        self.base = vllm_part("v1.kv_offload.base")
        self.contexts: dict[str, Any] = {}
        """Context of each request, by its name."""
        self.num_offered: dict[str, int] = {}
        """Number of the first blocks of each request that were offered for a store."""
        self.host = BlockStore(spec, self.CHUNKS)
        self.jobs: dict[int, Job] = {}
        self.job_numbers = itertools.count()

    # Requests

    def _request(self, token_ids: Sequence[int], namespace: Any) -> Any:
        request = super()._request(token_ids, namespace)
        self.contexts[request.request_id] = self.base.ReqContext(request.request_id)
        return request

    def _keys(self, request: Any) -> list[bytes]:
        """Return the keys of a request's full blocks."""
        context, keys = self.contexts[request.request_id], []
        for at, block_hash in enumerate(request.block_hashes, 1):
            keys.append(self.base.make_offload_key(block_hash, 0))
            context.set_offload_key_position(keys[-1], at * self.spec.block_size)
        return keys

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:
        count = super().begin(seq, token_ids, namespace)
        self.num_offered[self.requests[seq].request_id] = 0
        self._wait_for_stores(seq, count)
        return count

    def extend(self, seq: int, token: int) -> None:
        super().extend(seq, token)
        self._wait_for_stores(seq, len(self.stored_tokens[seq][0]))

    def stored(self, seq: int, tokens: int) -> None:
        super().stored(seq, tokens)
        self._begin_store(seq)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Append a batch or nothing of it: what a load still holds may leave no room."""
        self.refuse_without_room(seqs)
        for seq in seqs:
            if seq not in self.requests:  # it may have begun without a token
                self.stored_tokens.pop(seq, None)
        super().append(seqs, key, value)

    def preempt(self, seq: int) -> None:
        request = self.requests[seq]
        self._wait_for([number for number, job in self.jobs.items() if job.request is request])
        super().preempt(seq)

    def free(self, seq: int) -> None:
        request = self.requests.get(seq)
        if request is None:  # it began without a token
            del self.stored_tokens[seq]
            return
        load = next((each for each in self.jobs.values() if each.seq == seq), None)
        if load:
            load.seq = None
            del self.stored_tokens[seq]
            self._free_all_but(load)
        else:
            super().free(seq)
        del self.requests[seq]
        self.offloading.on_request_finished(self.contexts[request.request_id])

    def _free_all_but(self, load: Job) -> None:
        """Free the blocks of a request that its load does not write.

        vLLM's scheduler frees all of them when the load ends.
        """
        (group,) = self.manager.coordinator.single_type_managers
        blocks = group.req_to_blocks[load.request.request_id]
        found = blocks[: -len(load.blocks)]
        del blocks[: len(found)]
        self.manager.block_pool.free_blocks(reversed(found))

    def table(self, seq: int, layer: int) -> list[int | None]:
        return super().table(seq, layer) if seq in self.requests else []

    # Stores

    def _begin_store(self, seq: int) -> None:
        """Offer the blocks of a request that have become full."""
        request = self.requests[seq]
        keys, name = self._keys(request), request.request_id
        full = request.num_computed_tokens // self.spec.block_size
        new = keys[self.num_offered[name] : full]
        output = self.offloading.prepare_store(new, self.contexts[name]) if new else None
        if output is None:  # without space, they are offered again with the next block
            return
        self.num_offered[name] = full
        if stored := list(output.keys_to_store):
            table = self.manager.get_block_ids(name)[0]
            blocks = [table[keys.index(key)] for key in stored]
            chunks = output.store_spec.block_ids.tolist()
            self.jobs[next(self.job_numbers)] = Job(request, stored, blocks, chunks)

    def _wait_for_stores(self, seq: int, found: int) -> None:
        """Complete the stores of blocks that a sequence got after its ``found`` first tokens."""
        taken = {*self.table(seq, 0)[found // self.spec.block_size :]}
        jobs = self.jobs.items()
        self._wait_for([number for number, job in jobs if taken.intersection(job.blocks)])

    def _wait_for(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (job := self.jobs[number]).ready is None:
                self._copy(job, len(job.blocks))
                self._end_store(self.jobs.pop(number), len(job.keys))

    def _copy(self, job: Job, arrived: int) -> None:
        blocks, chunks = job.blocks[:arrived], job.chunks[:arrived]
        for first, host in zip(self.store.arena, self.host.arena, strict=True):
            if job.ready is None:
                host[:, chunks] = first[:, blocks]
            else:
                first[:, blocks] = host[:, chunks]

    def _end_store(self, job: Job, reported: int) -> None:
        context = self.contexts[job.request.request_id]
        self.offloading.complete_store(job.keys[:reported], context)
        self.offloading.complete_store(job.keys[reported:], context, success=False)

    # Loads

    def match_tiers(self, token_ids: Sequence[int]) -> int:
        request = self._request(token_ids, self.namespace(0))
        count = int(self.manager.get_computed_blocks(request)[1])
        return count + len(self._hits(request, count)) * self.spec.block_size

    def _hits(self, request: Any, count: int) -> list[bytes]:
        """Return the keys in host memory after the first ``count`` tokens of a text.

        One token of the text is left to compute.
        """
        size, context = self.spec.block_size, self.contexts[request.request_id]
        keys = self._keys(request)[count // size : (request.num_tokens - 1) // size]
        hit = self.base.LookupResult.HIT
        found = (self.offloading.lookup(key, context) is hit for key in keys)
        return [key for key, _ in zip(keys, itertools.takewhile(bool, found), strict=False)]

    def look_up(self, token_ids: Sequence[int]) -> object:
        return list(token_ids), self.namespace(0)

    def begin_with(self, prefix: Any, seq: int) -> int:
        return self._begin_with(prefix, seq, loads=False)[0]

    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        return self._begin_with(prefix, seq, loads=True)

    def _begin_with(self, prefix: Any, seq: int, *, loads: bool) -> tuple[int, int]:
        """Begin a sequence with as much of a text as is found and has room."""
        (token_ids, namespace), size = prefix, self.spec.block_size
        text = self._request(token_ids, namespace)
        cached, count, _ = self.manager.get_computed_blocks(text)
        hits = self._hits(text, count) if loads else []
        self.stored_tokens[seq] = [], namespace
        for blocks in range(len(hits), -1, -1):
            coming = blocks * size
            tokens = token_ids[: count + coming]
            if not tokens:
                return 0, 0
            request = self._request(tokens, namespace)
            external = {"num_external_computed_tokens": coming, "delay_cache_blocks": bool(coming)}
            if self.manager.allocate_slots(request, 0, count, cached, **external) is not None:
                break
        else:
            return 0, 0
        self.requests[seq], self.stored_tokens[seq] = request, (tokens, namespace)
        request.num_computed_tokens = count
        self.num_offered[request.request_id] = (count + coming) // size if coming else 0
        self._wait_for_stores(seq, count)
        if coming:
            self._begin_load(seq, hits[:blocks], prefix)
        return count, coming

    def _begin_load(self, seq: int, keys: list[bytes], prefix: Any) -> None:
        request = self.requests[seq]
        self._keys(request)
        chunks = self.offloading.prepare_load(keys, self.contexts[request.request_id])
        table = self.manager.get_block_ids(request.request_id)[0]
        ready = request.num_computed_tokens
        job = Job(request, keys, table[-len(keys) :], chunks.block_ids.tolist(), seq, ready, prefix)
        self.jobs[next(self.job_numbers)] = job

    def _end_load(self, job: Job, reported: int) -> int | None:
        request, seq = job.request, job.seq
        self.offloading.complete_load(job.keys, self.contexts[request.request_id])
        if seq is None:
            self.manager.free(request)
            return None
        assert job.ready is not None
        tokens = job.ready + reported * self.spec.block_size
        request.num_computed_tokens = tokens
        self.manager.cache_blocks(request, tokens)
        if reported == len(job.keys):
            return tokens
        # The blocks that did not arrive are given back: the sequence begins again with the others,
        # and finds no more, although another one may have computed them meanwhile.
        token_ids, namespace = job.prefix
        self.free(seq)
        return self.begin_with((token_ids[: tokens + 1], namespace), seq)

    def transfers_in_flight(self) -> Sequence[Transfer]:
        return [
            Transfer(number, "store" if job.ready is None else "load", job.blocks, job.seq)
            for number, job in self.jobs.items()
        ]

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        assert isinstance(transfer.id, int)
        job = self.jobs.pop(transfer.id)
        self._copy(job, result.arrived)
        if job.ready is not None:  # the connector's books know no job twice
            return self._end_load(job, result.reported)
        for _ in range(result.reports):
            self._end_store(job, result.reported)
        return None
