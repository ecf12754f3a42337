"""Adapter of vLLM's scheduler (V1) for hybrid models: attention layers, and layers with states.

The adapter is the model runner: it computes the tokens of each step, from the state that its block
table names for the token before, to the block for the new state, as vLLM's does for the cache mode
``align``. A state that is computed from a wrong one is NaN.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.capabilities.cache_data import CacheFull, CacheSpec
from pytest_roseinfer.capabilities.operation import MAX_SEQUENCES
from pytest_roseinfer.capabilities.payload import same_bits
from pytest_roseinfer.targets.block_manager import BlockStore, KeysAndValues, RowRecorder
from pytest_roseinfer.targets.vllm_kv import vllm_part
from pytest_roseinfer.targets.vllm_scheduler import NoGrammars, Settings, scheduler_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST = 1 << 12
"""Most tokens of a step, and of a request."""
_MAX_STEPS = 9
"""Most steps of the scheduler until a batch is written."""


class StatesVllmAdapter(RowRecorder):
    """Adapter with one group of attention layers, and others of state layers.

    The harness' blocks limit the tokens of all sequences; the pool has more blocks, for states.
    """

    prefixes = RowRecorder.prefixes.but(recomputed_tokens=1, finds="some")
    atomic_batches: ClassVar[bool] = True
    block_sizes = (2, 4, 1, 3)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "state groups": (1, 2, 3),
        "attention blocks per state block": (1, 2, 3),
        "speculative blocks": (0, 1, 2),
        "eagle": (False, True),
    }
    use_namespaces = RowRecorder.record_namespaces

    def make(self, spec: CacheSpec) -> None:
        self.spec, options = spec, spec.options
        self.state_size = spec.block_size * options["attention blocks per state block"]
        groups = min(options["state groups"], spec.num_layers)
        self.state_layers = [range(at, spec.num_layers, groups) for at in range(groups)]
        per_sequence = groups * (3 + options["speculative blocks"])
        blocks = 1 + spec.num_blocks + per_sequence * min(MAX_SEQUENCES, spec.num_blocks)
        self.store = BlockStore(spec, blocks)
        shape = spec.num_layers, blocks, spec.num_heads, spec.head_dim
        self.states = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=spec.device)
        self.scheduler = self._scheduler(blocks)
        self.manager = self.scheduler.kv_cache_manager
        utils, sha256 = vllm_part("v1.core.kv_cache_utils"), vllm_part("utils.hashing").sha256
        utils.init_none_hash(sha256)
        self.hasher = utils.get_request_block_hasher(spec.block_size, sha256)
        self.sampling = vllm_part("sampling_params").SamplingParams(max_tokens=_LONGEST)
        self.names = itertools.count()
        self.requests: dict[int, Any] = {}
        self.state_columns: dict[str, int] = {}
        """Column of the block tables that has the present state of each request."""
        self.last_states: dict[int, torch.Tensor] = {}
        """State after the last token of each sequence, as the harness gave it."""

    def _scheduler(self, blocks: int) -> Any:
        spec, interface = self.spec, vllm_part("v1.kv_cache_interface")
        dtype = getattr(torch, spec.dtype)
        attention = interface.FullAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_heads,
            head_size=spec.head_dim,
            dtype=dtype,
        )
        state = interface.MambaSpec(
            block_size=self.state_size,
            shapes=((spec.num_heads, spec.head_dim),),
            dtypes=(dtype,),
            mamba_cache_mode="align",
            num_speculative_blocks=spec.options["speculative blocks"],
        )
        groups = [interface.KVCacheGroupSpec(["attention"], attention, is_eagle_group=True)]
        for at, _ in enumerate(self.state_layers):
            groups.append(interface.KVCacheGroupSpec([f"state {at}"], state))
        options = {
            "max_num_seqs": _LONGEST,
            "max_num_batched_tokens": _LONGEST,
            "async_scheduling": False,
        }
        settings = scheduler_settings(blocks, _LONGEST, options, 0)
        settings.cache_config.mamba_cache_mode = "align"
        settings.cache_config.block_size = self.state_size
        if spec.options["eagle"]:
            names = ("use_eagle", "use_eagle_block_drop", "needs_eagle_block_drop")
            settings.speculative_config = Settings(
                **dict.fromkeys(names, lambda: True), max_num_new_slots_for_drafting=0
            )
        return vllm_part("v1.core.sched.scheduler").Scheduler(
            settings,
            interface.KVCacheConfig(blocks, [], groups),
            NoGrammars(),
            block_size=self.state_size,
            hash_block_size=spec.block_size,
        )

    # Writes

    def use_states(self, states: torch.Tensor) -> None:
        self.row_states = states.clone()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self._refuse_without_room(dict.fromkeys(seqs, 1))
        for row, seq in enumerate(seqs):
            if seq in self.requests:
                self.requests[seq].append_output_token_ids(*self.row_tokens[row])
            else:
                self._add(seq, row)
        inputs = key, value, self.row_states
        rows = [tuple(part[:, row : row + 1] for part in inputs) for row, _ in enumerate(seqs)]
        self._write(dict(zip(seqs, rows, strict=True)))

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._refuse_without_room({seq: key.shape[1]})
        self._add(seq, 0)
        self._write({seq: (key, value, self.row_states)})

    def _refuse_without_room(self, new: Mapping[int, int]) -> None:
        """Raise an error unless all tokens fit the harness' blocks, with these new ones."""
        lengths = {seq: request.num_tokens for seq, request in self.requests.items()}
        total = {seq: lengths.get(seq, 0) + new.get(seq, 0) for seq in {*lengths, *new}}
        blocks = sum(-(-length // self.spec.block_size) for length in total.values())
        if blocks > self.spec.num_blocks:
            raise CacheFull(f"{blocks} blocks needed, of {self.spec.num_blocks}")

    def _add(self, seq: int, row: int) -> None:
        self.requests[seq] = self._request(self.row_tokens[row], self.namespace(row))
        self.scheduler.add_request(self.requests[seq])

    def _request(self, token_ids: Sequence[int], namespace: int) -> Any:
        name, salt = str(next(self.names)), str(namespace)
        return vllm_part("v1.request").Request(
            name, list(token_ids), self.sampling, None, cache_salt=salt, block_hasher=self.hasher
        )

    def _write(self, inputs: Mapping[int, tuple[torch.Tensor, ...]]) -> None:
        """Run steps until the last tokens of these sequences are computed from their inputs."""
        requests = {self.requests[seq].request_id: seq for seq in inputs}
        for _ in range(_MAX_STEPS):
            plan = self.scheduler.schedule()
            self._copy(plan.kv_cache_block_copies or ())
            counts = plan.num_scheduled_tokens
            for name, count in counts.items():
                self._compute(requests[name], count, *inputs[requests[name]])
            rows = {name: row for row, name in enumerate(counts)}
            output = vllm_part("v1.outputs").ModelRunnerOutput([*rows], rows, [[] for _ in rows])
            self.scheduler.update_from_output(plan, output)
            lacking = [self.requests[seq] for seq in inputs]
            if all(each.num_computed_tokens == each.num_tokens for each in lacking):
                break
        else:
            raise RuntimeError(f"after {_MAX_STEPS} steps, some tokens were not scheduled")
        for seq, (_, _, states) in inputs.items():
            self.last_states[seq] = states[:, -1]

    def _copy(self, copies: Sequence[Any]) -> None:
        for each in copies:
            for storage in (*self.store.arena, self.states):
                storage[:, each.dst_block_id] = storage[:, each.src_block_id]

    def _compute(
        self, seq: int, count: int, key: torch.Tensor, value: torch.Tensor, states: torch.Tensor
    ) -> None:
        """Compute ``count`` tokens; the inputs are those of the last tokens of a sequence."""
        request = self.requests[seq]
        end = request.num_computed_tokens
        begin, first = end - count, request.num_tokens - key.shape[1]
        tokens = slice(begin - first, end - first)
        attention, *tables = self.manager.get_block_ids(request.request_id)
        self.store.write(attention, begin, key[:, tokens], value[:, tokens])
        column = -(-end // self.state_size) - 1
        before = self.state_columns.get(request.request_id, (begin - 1) // self.state_size)
        for layers, table in zip(self.state_layers, tables, strict=True):
            new = states[layers, end - first - 1]
            if begin:
                right = states[:, begin - first - 1] if begin > first else self.last_states[seq]
                old = self.states[layers, table[before]]
                new = new if same_bits(old, right[layers]) else torch.full_like(new, torch.nan)
            self.states[layers, table[column]] = new
        self.state_columns[request.request_id] = column

    def free(self, seq: int) -> None:
        request = self.requests.pop(seq)
        self.last_states.pop(seq, None)
        aborted = vllm_part("v1.request").RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(request.request_id, aborted)

    # Reads

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return int(self.manager.get_computed_blocks(self._request(token_ids, self.namespace(0)))[1])

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        request = self.requests[seq]
        attention, *_ = self.manager.get_block_ids(request.request_id)
        return self.store.read(attention, layer, request.num_tokens)

    def peek_state(self, seq: int) -> torch.Tensor:
        request = self.requests[seq]
        _, *tables = self.manager.get_block_ids(request.request_id)
        state = torch.empty_like(self.states[:, 0])
        for layers, table in zip(self.state_layers, tables, strict=True):
            state[layers] = self.states[layers, table[self.state_columns[request.request_id]]]
        return state
