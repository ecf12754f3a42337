"""Sequences that a model continues: prefill, decode, fork, release."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roseinfer.attention.backend import StepBatch, best_backend, find_backend
from roseinfer.engine_paths import EnginePath
from roseinfer.errors import BadArgument, RequestTooLarge
from roseinfer.kv.manager import StepAppend
from roseinfer.kv.storage import IndexStaging

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.models.causal import CausalModel


@dataclass(slots=True, eq=False)
class InferenceSession:
    """One sequence: its tokens, and where their keys and values are."""

    block_lists: list[list[int]]
    """A list of blocks for each group of layers."""
    token_ids: list[int] = field(default_factory=list)
    stored: int = 0
    """How many of the tokens have keys and values in the cache."""
    room: int = 0
    """Up to how many tokens its blocks take, as far as they are its own to write to."""


class SequenceRunner:
    """Runs sessions of any lengths through one model, on one cache."""

    def __init__(
        self, model: CausalModel, kv: KVBlockManager, *, attention: str | None = None
    ) -> None:
        """``attention`` names a backend; None takes the device's best."""
        self.model = model
        self.kv = kv
        self.path_counts: Counter[str] = Counter()
        self.staging = IndexStaging(kv.device, kv.work_counts)
        """Brings a step's numbers to the device, without a tensor being made for them."""
        backend = find_backend(attention or best_backend(kv.device))
        self.attention = backend(model.traits, kv, self.staging, self.path_counts)
        self._groups = kv.num_layers // kv.layers_per_group

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[InferenceSession], torch.Tensor]:
        """Start a session for each prompt; return them with the logits of their next tokens."""
        sessions = []
        for prompt in prompts:
            self.check_tokens(prompt)
            sessions.append(self.empty(list(prompt)))
        return sessions, self.extend(sessions)

    def extend(
        self, sessions: Sequence[InferenceSession], counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Store the next ``counts[i]`` tokens of session ``i``, or all that are not stored yet.

        Returns the logits behind the last token stored of each. It is fastest with sessions
        that store a single token in front.
        """
        pending = [len(session.token_ids) - session.stored for session in sessions]
        counts = pending if counts is None else list(counts)
        for at, (count, left) in enumerate(zip(counts, pending, strict=True)):
            if left < 1:
                raise BadArgument(f"session {at} has no token that is not stored yet")
            if not 1 <= count <= left:
                raise BadArgument(f"session {at} has {left} tokens to store, not {count}")
        logits = self._forward(sessions, counts)
        size = self.kv.block_size
        for session, count in zip(sessions, counts, strict=True):
            session.stored += count
            session.room = len(session.block_lists[0]) * size
        return logits

    def decode_step_sessions(self, sessions: Sequence[InferenceSession]) -> list[int]:
        """The most likely next token of every session, appended to each.

        A session's newest token is stored first, so every session must have exactly one
        that is not.
        """
        for at, session in enumerate(sessions):
            if len(session.token_ids) - session.stored != 1:
                raise BadArgument(
                    f"session {at} has {len(session.token_ids) - session.stored} tokens that are "
                    "not stored; a decode step takes one"
                )
        tokens: list[int] = self.extend(sessions).argmax(-1).tolist()
        for session, token in zip(sessions, tokens, strict=True):
            session.token_ids.append(token)
        return tokens

    def fork(self, session: InferenceSession) -> InferenceSession:
        """A session that shares all that is stored and goes its own way from here."""
        child = InferenceSession(
            [list(block_ids) for block_ids in session.block_lists],
            list(session.token_ids),
            session.stored,
        )
        for block_ids in child.block_lists:
            self.kv.incref_blocks(block_ids)
        session.room = child.room = session.stored
        self.path_counts[EnginePath.FORKED] += 1
        return child

    def release(self, session: InferenceSession) -> None:
        """Give back a session's blocks. The session is empty afterwards."""
        self.rewind(session)
        session.token_ids = []

    def rewind(self, session: InferenceSession) -> None:
        """Give back a session's blocks and keep its tokens, which can be stored again."""
        for group, block_ids in enumerate(session.block_lists):
            self.kv.free_blocks(group * self.kv.layers_per_group, block_ids)
        session.block_lists = [[] for _ in range(self._groups)]
        session.stored = session.room = 0

    def cut(self, session: InferenceSession, most: int) -> None:
        """Keep what is stored of the first ``most`` tokens, and no room for more."""
        session.stored = min(session.stored, most)
        for group, block_ids in enumerate(session.block_lists):
            self.kv.truncate(group * self.kv.layers_per_group, block_ids, session.stored)
        session.room = min(session.room, session.stored)

    def empty(self, token_ids: list[int]) -> InferenceSession:
        """A session of which nothing is stored yet."""
        return InferenceSession([[] for _ in range(self._groups)], token_ids)

    def check_tokens(self, prompt: Sequence[int]) -> None:
        """Raise for a prompt that the model cannot read."""
        shape = self.model.shape
        if not prompt:
            raise BadArgument("an empty prompt: at least one token is needed")
        if len(prompt) > shape.max_length:
            raise RequestTooLarge(
                f"a prompt of {len(prompt)} tokens for a model of {shape.max_length} positions"
            )
        if not all(0 <= token < shape.vocab_size for token in prompt):
            raise BadArgument(f"token ids must lie in 0..{shape.vocab_size - 1}")

    def _forward(self, sessions: Sequence[InferenceSession], counts: list[int]) -> torch.Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        lengths: list[int] = []
        for session, count in zip(sessions, counts, strict=True):
            end = session.stored + count
            if end > self.model.shape.max_length:
                raise BadArgument(f"position {end}: the model has {self.model.shape.max_length}")
            tokens += session.token_ids[session.stored : end]
            positions += range(session.stored, end)
            last_rows.append(len(tokens) - 1)
            lengths.append(end)
        singles = next((at for at, count in enumerate(counts) if count > 1), len(counts))
        one_each = singles == len(counts)
        lists = [session.block_lists for session in sessions]
        new = StepAppend(self.kv, lists, counts, one_each=one_each)
        self.attention.prepare(StepBatch(new, lists, counts, lengths, singles))
        for path in self.model.paths:
            self.path_counts[path] += 1
        stage = self.staging.stage
        token_ids, at = stage([tokens, positions]).columns
        rows = None if one_each else stage([last_rows]).columns[0]
        return self.model.logits(token_ids, at, rows, self.attention)
