"""The completions of requests, and the text that their tokens must show."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.answers import COUNTS, are_counts, is_number, refuse
from pytest_roseinfer.run.coverage import send_through

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_roseinfer.adapters.engine import Asked

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    _Answer = tuple[Callable[[Any], bool], str]
    """What an answer must be, as a check and in words."""


STAGES = ("waiting", "prefilling", "decoding", "preempted")


def refuse_wrong_answers(adapter: EngineAdapter) -> None:
    """Have each method of an adapter raise from here on where what it returns is no answer."""
    least = adapter.vocabulary
    logits: _Answer = (
        partial(_are_floats, least=least),
        f"a list of numbers, one for each token, of which there are {least} or more",
    )
    for name, (is_answer, due) in {**_ANSWERS, "logits": logits}.items():
        send_through(partial(_answered, name, is_answer, due), adapter, name)


def require_forks(forks: Collection[object], due: int) -> None:
    """Refuse more or fewer forks than there are samplings."""
    if len(forks) != due:
        refuse(_call("forked"), forks, f"{due} lists of tokens, one for each sampling")


def floats(shown: Any) -> Floats:
    """Return a list of numbers as an array; raise ``TypeError`` for what is none."""
    if isinstance(shown, torch.Tensor) and shown.is_floating_point():
        shown = shown.detach().cpu().double()  # NumPy cannot read tensors from everywhere
    found = np.asarray(shown)
    if found.ndim != 1 or found.dtype.kind not in "fiu":
        raise TypeError(f"no list of numbers: {shown!r}")
    return found.astype(np.float64)


def _answered(
    name: str,
    is_answer: Callable[[Any], bool],
    due: str,
    method: Callable[[], Any],
    *arguments: Any,
    **named: Any,
) -> Any:
    shown = method()(*arguments, **named)
    if not is_answer(shown):
        refuse(_call(name), shown, due)
    return shown


def _call(name: str) -> str:
    _, *parameters = signature(getattr(EngineAdapter, name)).parameters
    return f"{name}({', '.join(parameters)})"


def _listed(shown: Any) -> list[Any] | None:
    """Return what a list, a tuple or an array has in it; None for what is none of them."""
    if isinstance(shown, str | bytes | Mapping | Set) or not isinstance(shown, Collection):
        return None
    try:
        return list(shown)
    except TypeError:  # an array without a dimension
        return None


def _all(is_one: Callable[[Any], bool], shown: Any) -> bool:
    listed = _listed(shown)
    return listed is not None and all(map(is_one, listed))


def _is_text(shown: Any) -> bool:
    return isinstance(shown, str)


def _is_truth(shown: Any) -> bool:
    return isinstance(shown, bool | np.bool_)


def _are_tokens(shown: Any) -> bool:
    return _all(is_number, shown)


def _are_floats(shown: Any, *, least: int = 0) -> bool:
    try:
        return len(floats(shown)) >= least
    except (TypeError, ValueError):
        return False


def _is_float(shown: Any) -> bool:
    return _are_floats([shown])


def _is_pair(shown: Any) -> bool:
    pair = _listed(shown)
    return pair is not None and len(pair) == 2 and is_number(pair[0]) and _is_float(pair[1])


_TOKENS = (_are_tokens, "a list of tokens")
_TRUTH = (_is_truth, "True or False")
_TEXT = (_is_text, "a text")
_ANSWERS: dict[str, _Answer] = {
    "submit": (lambda shown: shown is not None, "what stands for the request from here on"),
    "tokens": _TOKENS,
    "ended": _TRUTH,
    "leftovers": (_is_text, "a text, which is empty where nothing is held"),
    "path_counts": (are_counts, COUNTS),
    "alone": _TOKENS,
    "forked": (partial(_all, _are_tokens), "a list of tokens for each sampling"),
    "undecided": _TRUTH,
    "logprobs": (_are_floats, "a list of numbers, one for each token"),
    "top_logprobs": (
        partial(_all, partial(_all, _is_pair)),
        "a list of pairs for each token, each of a token and its log-probability",
    ),
    "prompt_logprobs": (
        partial(_all, lambda shown: shown is None or _is_float(shown)),
        "a list of numbers, one for each token of the prompt, with None for the first",
    ),
    "pieces": (partial(_all, _is_text), "a list of texts"),
    "decoded": _TEXT,
    "stage": (lambda shown: _is_text(shown) and shown in STAGES, f"one of {', '.join(STAGES)}"),
    "cached_tokens": (is_number, "a number of tokens"),
    "spelled": _TEXT,
}


# What text a request must show, from its tokens decoded together and its stop strings.


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for a character of which bytes are missing."""
_NEVER = "\N{NULL}"
"""No text goes on with this character."""


def stop_strings(asked: Asked, text: str) -> tuple[str, ...]:
    """Return the request's stop strings, given its text without any.

    One that would go beyond the end begins like the text and never becomes complete.
    """
    found = []
    for begins, length in asked.stops:
        at = begins % len(text) if text else 0
        inside = text[at : at + length]
        found.append(inside if len(inside) == length else inside + _NEVER)
    return tuple(each for each in found if INCOMPLETE not in each)


def stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return where the stop string begins and ends that is complete first, the longest of these."""
    for end in range(1, len(text) + 1):
        complete = [len(each) for each in stops if text[:end].endswith(each)]
        if complete:
            return end - max(complete), end
    return None


def shown(text: str, stops: Sequence[str]) -> str:
    """Return a whole text up to the stop string that ends it, if one does."""
    found = stop(text, stops)
    return text[: found[0]] if found else text


def up_to_stop(
    tokens: Sequence[int], stops: Sequence[str], decoded: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return the tokens up to the one that completes a stop string."""
    counts = range(1, len(tokens) + 1)
    enough = (n for n in counts if stops and stop(decoded(tokens[:n]), stops))
    return list(tokens[: next(enough, len(tokens))])
