"""What does the steps of vLLM's scheduler without a GPU: its keys tell what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.targets.whole_engines.telling_keys import key_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Window = int | None


class VllmWorker:
    """Keeps requests, block tables and keys as a model runner of vLLM does."""

    def __init__(self, blocks: int, block_size: int, windows: Sequence[Window]) -> None:
        self.size, self.windows = block_size, windows
        self.keys = [[-1] * (blocks * block_size) for _ in windows]
        """The key in each slot, for every group of layers."""
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, tuple[list[int], ...]] = {}

    def execute(self, step: Any, vocabulary: int) -> dict[str, list[int]]:
        """Do a step; return the tokens that each of its requests gets.

        That is none for a part of a prompt, and more than one where drafts were right.
        """
        begins, drafts = self._told(step), step.scheduled_spec_decode_tokens
        return {
            name: self._forward(name, begins[name], count, drafts.get(name, []), vocabulary)
            for name, count in step.num_scheduled_tokens.items()
        }

    def drafts(self, name: str, most: int, vocabulary: int) -> list[int]:
        """Guess the tokens that come next: the first is right, and some of the others."""
        tokens = [*self.tokens[name]]
        for at in range(most):
            right = logits_by(self.windows, tokens, vocabulary).index(1.0)
            tokens.append((right + (at and len(tokens) % 3)) % vocabulary)
        return tokens[len(tokens) - most :]

    def _told(self, step: Any) -> dict[str, int]:
        """Take what is new of requests; return where the tokens of this step begin in each."""
        for name in step.finished_req_ids:
            self.tokens.pop(name, None)
        begins = {}
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.tables[new.req_id] = tuple(list(table) for table in new.block_ids)
            begins[new.req_id] = new.num_computed_tokens
        going = step.scheduled_cached_reqs
        columns = going.req_ids, going.new_block_ids, going.num_computed_tokens
        for name, blocks, computed in zip(*columns, strict=True):
            begins[name] = computed
            if name in going.resumed_req_ids:
                self.tables[name] = tuple(list(table) for table in blocks)
            elif blocks is not None:
                for table, more in zip(self.tables[name], blocks, strict=True):
                    table.extend(more)
        return begins

    def _forward(
        self, name: str, begin: int, count: int, drafts: Sequence[int], vocabulary: int
    ) -> list[int]:
        tokens = self.tokens[name]
        said = [*tokens, *drafts][begin : begin + count]
        likeliest = [
            sum(self._store(group, name, at, token) for group in range(len(self.windows)))
            % vocabulary
            for at, token in enumerate(said, begin)
        ]
        if begin + count < len(tokens):
            return []
        given = likeliest[len(likeliest) - len(drafts) - 1 :]
        right = next(
            (at for at, (a, b) in enumerate(zip(given, drafts, strict=False)) if a != b),
            len(drafts),
        )
        tokens += given[: right + 1]
        return given[: right + 1]

    def _store(self, group: int, name: str, position: int, token: int) -> int:
        first = first_seen(self.windows[group], position)
        slots = [self._slot(group, name, at) for at in range(first, position + 1)]
        seen = [self.keys[group][slot] for slot in slots[:-1]]
        key = key_of(token, position, seen)
        self.keys[group][slots[-1]] = key
        return key

    def _slot(self, group: int, name: str, at: int) -> int:
        return self.tables[name][group][at // self.size] * self.size + at % self.size


def first_seen(window: Window, position: int) -> int:
    return max(0, position - window + 1) if window else 0


def logits_by(windows: Sequence[Window], tokens: Sequence[int], vocabulary: int) -> list[float]:
    """Return the logits of the token after these, of a worker that sees what it should."""
    last = 0
    for window in windows:
        keys: list[int] = []
        for at, token in enumerate(tokens):
            keys.append(key_of(token, at, keys[first_seen(window, at) :]))
        last += keys[-1]
    return [float(token == last % vocabulary) for token in range(vocabulary)]
