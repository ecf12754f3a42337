"""Trial of an engine's model: how often another context changes the next token.

If it hardly ever does, as with the small weights that a new model has, then wrong keys or positions
hardly ever change a token either, and a search that compares tokens is blind to them.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling
from pytest_roseinfer.engine_capabilities.capability import for_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter

_CONTEXTS = 24
_TOKENS = 12
"""Most tokens of a context."""
LEAST_SHARE = 0.1
"""Share of the contexts below which a model is too insensitive for its tokens to show errors."""


_shares: WeakKeyDictionary[type[Any], float | None] = WeakKeyDictionary()


def sensitivity(adapter: type[Any]) -> float | None:
    """Return the share of ``_measure_share``, measured once for each adapter class."""
    if adapter not in _shares:
        _shares[adapter] = _measure_share(adapter)
    return _shares[adapter]


def _measure_share(adapter: type[Any]) -> float | None:
    """Return the share of contexts whose next token changes with one earlier token.

    That token is replaced or left out, whichever changes fewer next tokens. None if it is unknown:
    for a server, and for a model that cannot be tried before a mix is served.
    """
    if adapter.replays > 1:
        return None
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    mix = RequestMix((RequestSpec((0,)),), adapter.block_sizes[0], options=options)
    rng, changed = Random(0), [0, 0]
    length = min(_TOKENS, adapter.max_tokens - 1)
    try:
        engine = adapter()
        engine.make(mix)
        for _ in range(_CONTEXTS):
            context = [rng.randrange(adapter.vocabulary) for _ in range(length)]
            at = rng.randrange(length // 2 + 1)
            other = (context[at] + 1 + rng.randrange(adapter.vocabulary - 1)) % adapter.vocabulary
            begin, end = context[:at], context[at + 1 :]
            right = _next_token(engine, context, mix)
            changed[0] += right != _next_token(engine, [*begin, other, *end], mix)
            changed[1] += right != _next_token(engine, [*begin, *end], mix)
    except Exception:  # the search reports it, with a mix
        return None
    return min(changed) / _CONTEXTS


def _next_token(engine: EngineAdapter, context: Sequence[int], mix: RequestMix) -> int:
    if engine.defines("logits"):
        logits = [*map(float, engine.logits(context, mix))]
        return logits.index(max(logits))
    spec = for_adapter(type(engine), RequestSpec(tuple(context), Sampling(1, ignore_eos=True)))
    return int(engine.generate_alone(spec.prompt, spec.sampling, mix)[0])


def is_blind(adapter: type[Any]) -> bool:
    """Return True if tokens alone would hardly show wrong keys or positions."""
    share = sensitivity(adapter)
    return share is not None and share < LEAST_SHARE


def describe_blindness(adapter: type[Any]) -> str:
    """Describe a model whose tokens show little, with a remedy; empty where requests show more."""
    if not is_blind(adapter) or adapter.defines("logprobs"):
        return ""
    return (
        f"the model's next token changed in {sensitivity(adapter):.0%} of {_CONTEXTS} contexts "
        "with another earlier token, so wrong keys and positions hardly show: scale its weights "
        "until most change, or define logprobs and logits, which are then compared for each request"
    )
