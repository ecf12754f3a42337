"""Sequences of a tiny model that decode in slots or step by step."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch

from roseinfer import AppendPolicy, KVBlockManager, SamplingParams
from roseinfer.decode.step import Resident, ResidentDecode
from roseinfer.engine.runner import SequenceRunner
from roseinfer.models.causal import CausalModel
from tests.models.families import greedy_step, tiny

if TYPE_CHECKING:
    from roseinfer.kv.sequence import CachedSequence

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[7, 3, 90], [1], [4, 4, 8, 20], [50, 51, 52, 53, 54]]
SIZE = 4


def build_runner(
    device: str, family: str = "gpt2", blocks: int = 40, *, kernels: bool | None = None
) -> SequenceRunner:
    """Build a runner, by default with kernels only if compiled, since interpreting is slow."""
    model = CausalModel(deepcopy(tiny(family, device)))
    shape = model.shape
    kv = KVBlockManager(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        SIZE,
        blocks,
        device,
        torch.float32,
        AppendPolicy(triton=False),
        layers_per_group=shape.num_layers,
    )
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    on_kernels = device == "cuda" if kernels is None else kernels
    return SequenceRunner(model, kv, attention="triton" if on_kernels else "reference")


_MAX_TOKENS = 1 << 20
"""Maximum tokens of a sequence, far more than any test stores."""


class Decoding:
    """Sequences that prefill on the host and then decode on the device."""

    def __init__(
        self,
        device: str,
        *,
        family: str = "gpt2",
        kernels: bool | None = None,
        slots: int = 6,
        graphs: bool = False,
    ) -> None:
        self.sessions = build_runner(device, family, blocks=40 + 3 * slots, kernels=kernels)
        self.decode = ResidentDecode(
            self.sessions.model, self.sessions.attention, slots, graphs=graphs
        )
        self.running: list[tuple[CachedSequence, Resident]] = []

    def begin(self, prompt: list[int], params: SamplingParams = GREEDY, seed: int = 0) -> Resident:
        """Store a prompt and take its argmax as the first token to decode from."""
        (session,), logits = self.sessions.prefill([prompt])
        first = logits.argmax(-1)
        assert self.decode.supports(params, logits.shape[-1])
        resident = Resident(session, params, seed, _MAX_TOKENS, len(prompt))
        self.decode.add_sequences([resident], first)
        session.token_ids += first.tolist()
        self.running.append((session, resident))
        return resident

    def step(self) -> None:
        readback = self.decode.launch([resident for _, resident in self.running], 0)
        tokens = readback.wait()
        for session, resident in self.running:
            session.token_ids.append(tokens[resident.slot])

    def end(self, resident: Resident) -> None:
        """Remove a resident, keeping the tokens that the host knows."""
        self.decode.remove_sequence(resident)
        self.running = [pair for pair in self.running if pair[1] is not resident]
        resident.sequence.truncate(self.sessions.kv, len(resident.sequence.token_ids))
        self.sessions.release(resident.sequence)

    def texts(self) -> list[list[int]]:
        return [list(session.token_ids) for session, _ in self.running]


def alone(device: str, prompt: list[int], count: int, family: str = "gpt2") -> list[int]:
    """Return the prompt and its greedy completion, decoded step by step from the host."""
    engine = build_runner(device, family)
    (session,), logits = engine.prefill([prompt])
    session.token_ids += logits.argmax(-1).tolist()
    for _ in range(count - 1):
        greedy_step(engine, [session])
    return session.token_ids
