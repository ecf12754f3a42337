"""Engines of vLLM without a model: its scheduler, and the NIXL connector of each rank."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from pytest_roseinfer.targets.block_manager import BlockStore
from pytest_roseinfer.targets.nixl_network import HandshakeSocket, Network
from pytest_roseinfer.targets.partial_import import stub_package
from pytest_roseinfer.targets.vllm_kv import vllm_part
from pytest_roseinfer.targets.vllm_scheduler import NoGrammars, Settings, scheduler_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

_LONGEST = 1 << 13
"""Most tokens of a step, and of a request."""
_LOGGED_FAULTS = ("vllm.distributed.kv_transfer", "vllm.v1.core.sched.scheduler")
"""Loggers of failed reads, which a search makes by the thousand."""


def nixl_part(name: str) -> Any:
    with stub_package("einops"):  # vLLM's models need it, and none is built
        return vllm_part(f"distributed.kv_transfer.kv_connector.v1.nixl.{name}")


class RankStore(BlockStore):
    """Blocks of several ranks, each with an equal share of the heads, as vLLM lays them out.

    A layer of a rank is ``[blocks, heads, block_size, 2 * head_dim]``, keys before values.
    """

    def __init__(self, spec: CacheSpec, block_size: int, num_blocks: int, ranks: int) -> None:
        shape = (num_blocks, spec.num_heads // ranks, block_size, 2 * spec.head_dim)
        self.ranks = torch.zeros(
            (ranks, spec.num_layers, *shape), dtype=getattr(torch, spec.dtype), device=spec.device
        )
        # A view: there is one rank, or one head on each.
        heads = self.ranks.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        self.block_size = block_size
        self.arena = heads[..., : spec.head_dim], heads[..., spec.head_dim :]

    def layers(self, rank: int) -> dict[str, torch.Tensor]:
        return dict(zip(self.layer_names, self.ranks[rank], strict=True))

    @property
    def layer_names(self) -> list[str]:
        return [f"layers.{at}" for at in range(self.ranks.shape[1])]

    def kv_cache_config(self, num_heads: int) -> Any:
        _, _, blocks, _, size, width = self.ranks.shape
        interface = vllm_part("v1.kv_cache_interface")
        layer = interface.FullAttentionSpec(
            block_size=size, num_kv_heads=num_heads, head_size=width // 2, dtype=self.ranks.dtype
        )
        group = interface.KVCacheGroupSpec(self.layer_names, layer)
        return interface.KVCacheConfig(blocks, [], [group])


# An engine without a model.


class _Now:
    """Executor that runs a job when it is submitted."""

    def submit(self, job: Callable[..., Any], *arguments: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(job(*arguments))
        except Exception as error:  # the connector handles it
            future.set_exception(error)
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Nothing is running."""


class Engine:
    """A scheduler of vLLM, and its NIXL connector on each rank."""

    def __init__(self, network: Network, store: RankStore, settings: Settings) -> None:
        for name in _LOGGED_FAULTS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.store, self.network = store, network
        ranks, _, _, heads, size, _ = store.ranks.shape
        self.finished_params: dict[str, Any] = {}
        """Parameters by which another engine reads a request that has finished, by its name."""
        self.outputs: list[Any] = []
        """Outputs of the connector that the scheduler gets in the next step."""
        connector = nixl_part("connector").NixlConnector
        sys.modules["vllm"].__version__ = vllm_part("version").__version__  # type: ignore[attr-defined]
        self.scheduler = vllm_part("v1.core.sched.scheduler").Scheduler(
            settings, store.kv_cache_config(heads * ranks), NoGrammars(), block_size=size
        )
        connectors = vllm_part("distributed.kv_transfer.kv_connector.v1")
        self.workers = []
        for rank in range(ranks):
            with in_process(network, rank, ranks):
                worker = connector(
                    settings, connectors.KVConnectorRole.WORKER, store.kv_cache_config(heads)
                )
                worker.register_kv_caches(store.layers(rank))
            worker.connector_worker._handshake_initiation_executor = _Now()
            self.workers.append(worker)
        utils = vllm_part("distributed.kv_transfer.kv_connector.utils")
        self.aggregator = utils.KVOutputAggregator(ranks)
        self.connector = self.scheduler.connector
        self._record_finished_params()

    def _record_finished_params(self) -> None:
        finish = self.connector.request_finished_all_groups

        def record(request: Any, block_ids: Any) -> Any:
            delayed, params = finish(request, block_ids)
            self.finished_params[request.request_id] = params
            return delayed, params

        self.connector.request_finished_all_groups = record

    def listen(self) -> None:
        """Answer handshakes, without the thread that does so in vLLM."""
        scheduler = self.connector.connector_scheduler
        scheduler._nixl_handshake_listener_t = SimpleNamespace(join=lambda: None)
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): each.get_handshake_metadata() for rank, each in enumerate(self.workers)}
        )
        msgpack = nixl_part("base_scheduler").msgspec.msgpack

        def answer(message: bytes) -> list[bytes]:
            _, *rank = msgpack.decode(message)
            return [scheduler._handshake_data[tuple(rank)], msgpack.encode(0.0)]

        self.network.socket = HandshakeSocket(answer)

    def step(self) -> tuple[dict[str, int], Any]:
        """Run a step of the engine; return the numbers of tokens computed, and of the connector.

        The scheduler does not get the output of the connector, but those in ``outputs``.
        """
        plan = self.scheduler.schedule()
        counts = plan.num_scheduled_tokens
        parts = vllm_part("v1.outputs")
        ranks = [
            parts.ModelRunnerOutput([], {}, kv_connector_output=self._work(rank, each, plan))
            for rank, each in enumerate(self.workers)
        ]
        mine = self.aggregator.aggregate(ranks).kv_connector_output
        rows = {name: row for row, name in enumerate(counts)}
        for output in self.outputs or [parts.KVConnectorOutput()]:
            done = parts.ModelRunnerOutput([*rows], rows, [[] for _ in rows])
            done.kv_connector_output = output
            self.scheduler.update_from_output(plan, done)
        self.outputs = []
        return counts, mine

    def _work(self, rank: int, worker: Any, plan: Any) -> Any:
        worker.bind_connector_metadata(plan.kv_connector_metadata)
        with in_process(self.network, rank, len(self.workers)):
            worker.start_load_kv(None)
            results = worker.get_transfer_results(plan.finished_req_ids)
        invalid = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        return vllm_part("v1.outputs").KVConnectorOutput(
            results.finished_sending,
            results.finished_recving,
            invalid_block_ids=invalid,
            failed_recving=results.failed_recving,
        )

    def finish(self, name: str, status: str) -> None:
        self.scheduler.finish_requests(name, getattr(vllm_part("v1.request").RequestStatus, status))

    def blocks(self, name: str) -> list[int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(table)


@contextmanager
def in_process(network: Network, rank: int, ranks: int) -> Iterator[None]:
    """Replace what the connector's workers find of devices, processes and sockets."""
    platform = SimpleNamespace(
        device_type="cuda",
        get_nixl_memory_type=lambda: None,
        set_device=lambda _: None,
        is_rocm=lambda: False,
    )
    backend = SimpleNamespace(
        get_name=lambda: "FAKE", get_supported_kernel_block_sizes=lambda _: _any_size()
    )
    with mock.patch.multiple(
        nixl_part("base_worker"),
        NixlWrapper=network.agent,
        nixl_agent_config=None,
        check_nixl_version=lambda _: None,
        current_platform=platform,
        get_current_attn_backends=lambda _: [backend],
        get_tensor_model_parallel_rank=lambda: rank,
        get_tensor_model_parallel_world_size=lambda: ranks,
        async_tensor_h2d=lambda data, device, dtype: torch.tensor(data, dtype=dtype, device=device),
        zmq_ctx=lambda *_: network.socket.opened(),
    ):
        yield


def _any_size() -> list[Any]:
    return [vllm_part("v1.attention.backend").MultipleOf(1)]


def engine_settings(spec: CacheSpec, store: RankStore, role: str, policy: str) -> Settings:
    """Return a stand-in for the ``VllmConfig`` of one side."""
    ranks, _, blocks, _, size, _ = store.ranks.shape
    options = {
        "max_num_seqs": _LONGEST,
        "max_num_batched_tokens": _LONGEST,
        "async_scheduling": False,
    }
    settings = scheduler_settings(blocks, _LONGEST, options, 0)
    settings.kv_transfer_config = vllm_part("config").KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role=role,
        engine_id=role,
        kv_buffer_device="cuda",
        kv_load_failure_policy=policy,
    )
    settings.parallel_config.tensor_parallel_size = ranks
    settings.cache_config.block_size = size
    settings.cache_config.enable_prefix_caching = role == "kv_consumer"
    layout = vllm_part("v1.kv_cache_interface").KVCacheLayout.LBHNC
    settings.cache_config.get_resolved_kv_cache_layout = lambda: layout
    for name, value in {
        "get_total_num_kv_heads": spec.num_heads,
        "get_head_size": spec.head_dim,
        "get_total_num_hidden_layers": spec.num_layers,
    }.items():
        setattr(settings.model_config, name, lambda value=value: value)
    settings.compilation_config = Settings(static_forward_context={})
    return settings
