"""What each endpoint answers, whole or in parts, in one form for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Choice:
    """One of the texts of an answer."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    """Each token and, behind it, the likeliest at its place, if log-probabilities are asked for."""
    logprobs: list[float] = field(default_factory=list, compare=False)
    """Those of ``tokens``, which need not be the same to the last bit."""

    def add_token(self, token: str, logprob: float, likeliest: dict[str, float]) -> None:
        self.tokens += [token, *likeliest]
        self.logprobs += [logprob, *likeliest.values()]


@dataclass(slots=True)
class Answer:
    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int

    @property
    def logprobs(self) -> list[float]:
        return [logprob for choice in self.choices for logprob in choice.logprobs]


def of_completions(parts: list[Any]) -> Answer:
    return _of_choices(parts, _add_completion)


def of_chats(parts: list[Any]) -> Answer:
    return _of_choices(parts, _add_message)


def of_responses(parts: list[Any]) -> Answer:
    last = parts[-1]
    whole = getattr(last, "response", last)
    if whole is not last:
        deltas = [each.delta for each in parts if each.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
    reason = {"completed": "stop", "incomplete": "length"}[whole.status]
    choice = Choice(whole.output_text, reason)
    return Answer([choice], whole.usage.input_tokens, whole.usage.output_tokens)


def _of_choices(parts: list[Any], add: Callable[[Choice, Any], None]) -> Answer:
    found: dict[int, Choice] = {}
    for part in parts:
        for each in part.choices:
            choice = found.setdefault(each.index, Choice())
            assert choice.finish_reason is None
            add(choice, each)
            choice.finish_reason = each.finish_reason
    usage = parts[-1].usage
    choices = [found[index] for index in range(len(found))]
    return Answer(choices, usage.prompt_tokens, usage.completion_tokens)


def _add_completion(choice: Choice, part: Any) -> None:
    choice.text += part.text
    if told := part.logprobs:
        tops = told.top_logprobs or [{} for _ in told.tokens]
        for token, logprob, likeliest in zip(told.tokens, told.token_logprobs, tops, strict=True):
            choice.add_token(token, logprob, likeliest)


def _add_message(choice: Choice, part: Any) -> None:
    said = part.delta if hasattr(part, "delta") else part.message
    choice.text += said.content or ""
    for token in part.logprobs.content if part.logprobs else ():
        likeliest = {each.token: each.logprob for each in token.top_logprobs}
        choice.add_token(token.token, token.logprob, likeliest)
