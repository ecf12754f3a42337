"""Adapter of vLLM's NIXL connector (V1): a decode engine reads prompts from a prefill engine.

Each side has vLLM's scheduler and the connector's workers, one for each rank, above storage of this
process. A fake network and a fake model replace the rest: the model writes the tokens that a step
computes. The last token of a prompt is computed again after the read, as in vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import CacheFull, CacheSpec, Transfer
from pytest_roseinfer.capabilities.disaggregation import RemoteTraits
from pytest_roseinfer.targets.nixl_network import Network
from pytest_roseinfer.targets.vllm_kv import VllmAdapter
from pytest_roseinfer.targets.vllm_nixl_engine import Engine, RankStore, engine_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import TransferResult
    from pytest_roseinfer.capabilities.disaggregation import ReceiveStatus
    from pytest_roseinfer.targets.block_manager import KeysAndValues


class NixlVllmAdapter(VllmAdapter):
    """Adapter of a decode engine with one or two ranks, and a prefill engine as large or larger."""

    head_counts = (2,)
    head_dims = (4,)
    block_sizes: ClassVar[Sequence[int]] = (2, 4, 1, 3)
    atomic_batches = True
    remote = RemoteTraits(ranks=(1, 2), while_prefilling=False, keeps_cancelled=False)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "ranks": (1, 2),
        "kv_load_failure_policy": ("fail", "recompute"),
        "aborted by": ("prefill side", "decode side"),
    }
    # Not offered: the scheduler would schedule a sequence that it does not know to be preempted,
    # and resets cannot be judged with receives.
    preempt = KVCacheAdapter.preempt
    resume = KVCacheAdapter.resume
    reset = KVCacheAdapter.reset

    def manage(self, spec: CacheSpec) -> None:
        super().manage(spec)
        self.network = Network()
        sizes = spec.block_size, spec.num_blocks, self.ranks
        self.decode_engine = self._engine("kv_consumer", *sizes)
        self.store = self.decode_engine.store
        self.manager = self.decode_engine.scheduler.kv_cache_manager
        self.prompts: dict[int, str] = {}
        """Name of the request of each prompt in the prefill engine."""
        self.computed: dict[int, list[KeysAndValues]] = {}
        """Keys and values of each prompt, which the model computes on both sides."""
        self.receives: dict[str, int] = {}
        """Sequence of each request that is being received."""
        self.results: dict[str, Any] = {}
        """Output of the connector for each receive that has ended."""
        self.leaving: set[str] = set()
        """Requests of the prefill engine whose prompts have ended."""

    @property
    def ranks(self) -> int:
        return int(self.spec.options["ranks"])

    @property
    def policy(self) -> str:
        return str(self.spec.options["kv_load_failure_policy"])

    def _engine(self, role: str, block_size: int, num_blocks: int, ranks: int) -> Engine:
        store = RankStore(self.spec, block_size, num_blocks + 1, ranks)
        return Engine(self.network, store, engine_settings(self.spec, store, role, self.policy))

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.refuse_without_room(seqs)
        super().append(seqs, key, value)

    def release(self, seq: int) -> None:
        """Free a sequence, which the scheduler knows if it was received."""
        name = self.requests[seq].request_id
        if name in self.decode_engine.scheduler.requests:
            self.decode_engine.finish(name, "FINISHED_ABORTED")
        else:
            super().release(seq)

    # The prefill side

    def make_remote(self, block_size: int, num_blocks: int, ranks: int) -> None:
        self.prefill_engine = self._engine("kv_producer", block_size, num_blocks, ranks)
        self.prefill_engine.listen()

    def remote_prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        scheduler, tokens = self.prefill_engine.scheduler, [0] * key.shape[1]
        if seq in self.prompts:
            scheduler.requests[self.prompts[seq]].append_output_token_ids(tokens)
        else:
            request = self._request(tokens, self.namespace(0))
            request.kv_transfer_params = {"do_remote_decode": True}
            self.prompts[seq], self.computed[seq] = request.request_id, []
            scheduler.add_request(request)
        self.computed[seq].append((key.clone(), value.clone()))
        self._step_prefill()
        blocks = self.prefill_engine.blocks(self.prompts[seq])
        begin = self._num_written(seq) - len(tokens)
        self.prefill_engine.store.write(blocks, begin, key, value)

    def _num_written(self, seq: int) -> int:
        return int(self.prefill_engine.scheduler.requests[self.prompts[seq]].num_computed_tokens)

    def _step_prefill(self) -> None:
        """Run a step, and one more if a request has been read: its blocks are freed."""
        _, output = self.prefill_engine.step()
        if output.finished_sending:
            self.prefill_engine.outputs.append(output)
            self.prefill_engine.step()

    def peek_remote(self, seq: int, layer: int) -> KeysAndValues:
        blocks = self.prefill_engine.blocks(self.prompts[seq])
        return self.prefill_engine.store.read(blocks, layer, self._num_written(seq))

    def remote_free_blocks(self) -> int:
        pool = self.prefill_engine.scheduler.kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks())

    def abort_remote(self, seq: int) -> None:
        name = self.prompts[seq]
        if seq in self.receives.values():
            self.cancel_receive(seq)
            return
        if self.spec.options["aborted by"] == "prefill side":
            self.prefill_engine.finish(name, "FINISHED_ABORTED")
        else:
            request = self._request([0], 0)
            request.kv_transfer_params = self._finish_prompt(name)
            self.decode_engine.scheduler.add_request(request)
            self.decode_engine.finish(request.request_id, "FINISHED_ABORTED")
            self._step_decode()
        self._step_prefill()
        del self.prompts[seq], self.computed[seq]  # no lease needs to expire

    def _finish_prompt(self, name: str) -> dict[str, Any]:
        """Finish a request of the prefill engine; return how to read it."""
        self.prefill_engine.finish(name, "FINISHED_LENGTH_CAPPED")
        self._step_prefill()
        return dict(self.prefill_engine.finished_params.pop(name))

    def _end_prompt(self, seq: int) -> None:
        self.leaving.add(self.prompts.pop(seq))
        del self.computed[seq]
        self._expire_leases()

    def _expire_leases(self) -> None:
        """Let time pass for requests that nobody reads: a read that failed ends none."""
        self.leaving &= self.prefill_engine.scheduler.requests.keys()
        for name in self.leaving - self.network.sources():
            for worker in self.prefill_engine.workers:
                leases = worker.connector_worker._reqs_to_send
                leases |= dict.fromkeys({name} & leases.keys(), 0.0)
        self._step_prefill()

    # The decode side

    def begin_receive(self, seq: int, num_tokens: int) -> None:  # noqa: ARG002
        request = self._request(self.row_tokens[0], self.receive_namespace())
        self._refuse_waiting(request)
        request.kv_transfer_params = self._finish_prompt(self.prompts[seq])
        self.requests[seq], self.receives[request.request_id] = request, seq
        self.decode_engine.scheduler.add_request(request)
        self._step_decode()

    def receive_namespace(self) -> Any:
        """Return the namespace of the blocks of a receive."""
        return self.namespace(0)

    def _refuse_waiting(self, request: Any) -> None:
        """Raise an error if the request would wait for blocks, which vLLM's scheduler allows."""
        (found,) = self.manager.get_computed_blocks(request)[0].blocks
        needed = -(-request.num_tokens // self.spec.block_size) - len(found)
        free = self.manager.block_pool.get_num_free_blocks()
        if needed > free - sum(block.ref_cnt == 0 for block in found):
            raise CacheFull

    def _step_decode(self) -> None:
        """Run steps until the scheduler has the results of all but the harness' receives."""
        counts, output = self.decode_engine.step()
        for name, count in counts.items():
            self._compute(name, count)
        for name in output.finished_recving or ():
            result = replace(
                output,
                finished_recving={name},
                failed_recving=output.failed_recving & {name},
                invalid_block_ids=output.invalid_block_ids & {*self.decode_engine.blocks(name)},
            )
            if name in self.receives:
                self.results[name] = result
            else:
                self.decode_engine.outputs.append(result)
        if self.decode_engine.outputs:
            self._step_decode()

    def _compute(self, name: str, count: int) -> None:
        """Write the tokens of a prompt that a step computes."""
        end = self.decode_engine.scheduler.requests[name].num_computed_tokens
        key, value = (
            torch.cat(parts, 1)[:, end - count : end]
            for parts in zip(*self.computed[self.receives[name]], strict=True)
        )
        self.store.write(self.decode_engine.blocks(name), end - count, key, value)

    def poll_receive(self, seq: int) -> ReceiveStatus:
        name = self.requests[seq].request_id
        if self.policy == "fail" and self._has_failed(name):
            return "failed"
        return "done" if name in self.results else "in flight"

    def _has_failed(self, name: str) -> bool:
        """Return True if a read has failed, which vLLM reports once all of them have ended."""
        failed = [side.connector_worker._recv_failures for side in self.decode_engine.workers]
        if name in self.results:
            failed.append(self.results[name].failed_recving)
        return name in self.decode_engine.aggregator._failed_recving_pending.union(*failed)

    def finish_receive(self, seq: int) -> None:
        request = self.requests[seq]
        self.decode_engine.outputs.append(self.results.pop(request.request_id))
        self._step_decode()  # the scheduler gets the result
        self._step_decode()  # and computes what is not there
        del self.receives[request.request_id]
        self.stored_tokens[seq] = list(request.all_token_ids), 0  # no sequence begins again
        self._end_prompt(seq)

    def cancel_receive(self, seq: int) -> None:
        name = self.requests.pop(seq).request_id
        del self.receives[name]
        result = self.results.pop(name, None)
        if not (result and result.failed_recving and self.policy == "fail"):  # else it fails itself
            self.decode_engine.finish(name, "FINISHED_ABORTED")
        if result:
            self.decode_engine.outputs.append(result)
        self._step_decode()
        self._end_prompt(seq)

    def transfers_in_flight(self) -> list[Transfer]:
        sides = [worker.connector_worker for worker in self.decode_engine.workers]
        return [
            self._transfer(handle, name, side._recving_metadata[name])
            for side in sides
            for name, handles in side._recving_transfers.items()
            for handle in handles
            if self.network.reads[handle].state == "PROC"
        ]

    def _transfer(self, handle: int, name: str, meta: Any) -> Transfer:
        (blocks,), seq = meta.local_block_ids, self.receives.get(name)
        found = {*self.decode_engine.blocks(name)} - {*blocks} if seq is None else set[int]()
        return Transfer(handle, "receive", list(blocks), seq, held_blocks=sorted(found))

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
        whole = result.reported == transfer.num_blocks
        self.network.end(transfer.id, result.arrived, transfer.num_blocks, succeeds=whole)
        self._step_decode()
        self._expire_leases()


class BlockSizesNixlVllmAdapter(NixlVllmAdapter):
    """Adapter whose prefill engine may have smaller blocks, and that reads whole prompts.

    Receives neither find blocks of the decode engine nor leave any to be found.
    """

    prefixes = NixlVllmAdapter.prefixes.but(finds="some")
    remote = RemoteTraits(
        block_sizes=(1, 2),
        multiples=True,
        larger_blocks=False,
        while_prefilling=False,
        keeps_cancelled=False,
    )
    block_sizes = (2, 4)

    def receive_namespace(self) -> Any:
        return f"receive {next(self.numbers)}"


class CachingNixlVllmAdapter(BlockSizesNixlVllmAdapter):
    """Adapter whose receives also find blocks of the decode engine, and read what follows."""

    def receive_namespace(self) -> Any:
        return self.namespace(0)
