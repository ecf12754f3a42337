"""Handing prompts to the engine: as text, tokenized beforehand, or tokenized meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

    from roseinfer.llm import Prompt


class PromptFeed:
    """The prompts of one run. With ``workers`` threads tokenize from the moment it is entered."""

    def __init__(self, prompts: tuple[Prompt, ...], tokenizer: Any, workers: int = 0) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(workers, "tokenize") if workers else None
        self._coming: list[Future[Prompt]] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def __enter__(self) -> PromptFeed:
        if self._pool:
            encode = self._tokenizer.encode
            self._coming = [self._pool.submit(encode, prompt) for prompt in self._prompts]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def is_ready(self, at: int) -> bool:
        """Whether taking that prompt means no waiting."""
        return not self._coming or self._coming[at].done()

    def take(self, at: int) -> Prompt:
        return self._coming[at].result() if self._coming else self._prompts[at]


def tokenized(prompts: tuple[Prompt, ...], tokenizer: Any) -> tuple[Prompt, ...]:
    """Token ids for whatever is text."""
    return tuple(tokenizer.encode(each) if isinstance(each, str) else each for each in prompts)
