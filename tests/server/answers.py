"""Responses of all endpoints, whole or streamed, in one form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Choice:
    """One choice of a response."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    """Each token followed by its top tokens, if logprobs were requested."""
    logprobs: list[float] = field(default_factory=list, compare=False)
    """Logprobs of ``tokens``, which are compared with a tolerance."""

    def add_token(self, token: str, logprob: float, top: dict[str, float]) -> None:
        self.tokens += [token, *top]
        self.logprobs += [logprob, *top.values()]


@dataclass(slots=True)
class Answer:
    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int

    @property
    def logprobs(self) -> list[float]:
        return [logprob for choice in self.choices for logprob in choice.logprobs]


def read_completions(parts: list[Any]) -> Answer:
    return _read_choices(parts, _add_completion)


def read_chats(parts: list[Any]) -> Answer:
    return _read_choices(parts, _add_message)


def read_responses(parts: list[Any]) -> Answer:
    last = parts[-1]
    whole = getattr(last, "response", last)
    if whole is not last:
        deltas = [each.delta for each in parts if each.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
    reason = {"completed": "stop", "incomplete": "length"}[whole.status]
    choice = Choice(whole.output_text, reason)
    return Answer([choice], whole.usage.input_tokens, whole.usage.output_tokens)


def _read_choices(parts: list[Any], add: Callable[[Choice, Any], None]) -> Answer:
    by_index: dict[int, Choice] = {}
    for part in parts:
        for each in part.choices:
            choice = by_index.setdefault(each.index, Choice())
            assert choice.finish_reason is None
            add(choice, each)
            choice.finish_reason = each.finish_reason
    usage = parts[-1].usage
    choices = [by_index[index] for index in range(len(by_index))]
    return Answer(choices, usage.prompt_tokens, usage.completion_tokens)


def _add_completion(choice: Choice, part: Any) -> None:
    choice.text += part.text
    if logprobs_part := part.logprobs:
        tops = logprobs_part.top_logprobs or [{} for _ in logprobs_part.tokens]
        for token, logprob, top in zip(
            logprobs_part.tokens, logprobs_part.token_logprobs, tops, strict=True
        ):
            choice.add_token(token, logprob, top)


def _add_message(choice: Choice, part: Any) -> None:
    message = part.delta if hasattr(part, "delta") else part.message
    choice.text += message.content or ""
    for token in part.logprobs.content if part.logprobs else ():
        top = {each.token: each.logprob for each in token.top_logprobs}
        choice.add_token(token.token, token.logprob, top)
