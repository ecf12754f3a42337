"""Sampling: the tokens of a request's slow twin, and the tokens that its parameters allow.

The allowed tokens are computed in NumPy from a model's logits alone. The order is that of
transformers: repetition penalty, temperature, top-k, top-p, min-p. OpenAI's two penalties come
right after the repetition penalty, as in vLLM, and then the adjustments of other capabilities.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.capability import Traits, optional
from pytest_roseinfer.capabilities.return_values import (
    are_floats,
    are_tokens,
    floats,
    is_bool,
    returns,
)
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    RequestCore,
    SamplingCore,
    capabilities_of_fields,
    change,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy as np
    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import Floats, ServedRequest

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
else:
    from pytest_roseinfer.capabilities import numpy as np
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True)
class SamplingFields(SamplingCore):
    """Parameters of sampling."""

    temperature: float = 0.0
    """Divisor of the logits; 0 takes the argmax."""
    top_k: int = 0
    """Number of tokens with the highest logits that may be sampled; 0 for all."""
    top_p: float = 1.0
    """Nucleus probability: only the fewest tokens with this total probability may be sampled."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, of all tokens so far."""
    seed: int = 0
    """Seed of the random draws."""
    min_p: float = 0.0
    """Fraction of the top probability; tokens below it are dropped."""
    presence_penalty: float = 0.0
    """Number that is subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Number that is subtracted from a token's logit for each time that it was generated."""


@dataclass(frozen=True, kw_only=True)
class EarlyEndFields(RequestCore):
    """Fields of a request that the model itself ends."""

    ends_early: bool = False
    """True if settling takes the next seed that ends the text before ``max_new_tokens``, after two
    tokens or more; an engine that is ``greedy_only`` gets another last token of its prompt."""
    ends_first: bool = False
    """True if settling takes the next seed, or another last token of the prompt, with which the
    first new token ends the text."""


@dataclass(frozen=True)
class SamplingTraits(Traits):
    """Parameters that an engine supports."""

    greedy_only: bool = False
    """True if every request gets the argmax of the logits, so that only its length and
    ``ignore_eos`` are drawn; ``logits`` then suffices in place of ``generate_alone``."""
    min_p: bool = False
    """True if requests may set ``min_p``."""
    presence_and_frequency: bool = False
    """True if requests may set ``presence_penalty`` and ``frequency_penalty``."""
    max_seed: int = 2**31 - 1
    """Largest seed that requests may have."""


class SamplingMethods:
    """Adapter methods that define the right tokens."""

    sampling: ClassVar[SamplingTraits] = SamplingTraits()
    """Parameters that the engine supports."""
    eos_token: ClassVar[int | None] = None
    """End-of-sequence token, for an adapter that does not define ``generate_alone``; None if no
    token ends a text."""
    other_eos_tokens: ClassVar[Collection[int]] = ()
    """Further tokens that end a text as ``eos_token`` does."""
    rounding: ClassVar[float] = 3e-5
    """Largest difference between the engine's logits and ``logits``, relative to the largest."""

    @optional
    @returns(are_tokens, "a list of tokens")
    def generate_alone(self: Any, prompt: Sequence[int], sampling: Any, mix: Any) -> list[int]:
        """Return the tokens of the slow twin: this request alone, without fast paths.

        It is optional only if ``sampling.greedy_only`` is True: then each token is the argmax of
        ``logits``. It gets no drawn ``stop``: the harness cuts its result after the token that
        completes a stop string. The result may depend on the mix's switches, block size and device,
        but not on its requests or their room: it is kept for other mixes, unless ``replays`` is
        more than 1.
        """
        new: list[int] = []
        goes_on = sampling.ignore_eos
        ends = {*eos_tokens(type(self))}
        while len(new) < sampling.max_new_tokens and (goes_on or ends.isdisjoint(new)):
            new.append(int(logits_of(self, [*prompt, *new], mix).argmax()))
        return new

    @optional
    @returns(is_bool, "True or False")
    def is_near_tie(self: Any, tokens: Sequence[int], sampling: Any, mix: Any) -> bool:  # noqa: ARG002
        """Return True if rounding could change the token after these.

        It is called when a token differs from ``generate_alone``; if True, the rest of that request
        is not compared with it. The default, for ``sampling.greedy_only``, is True if ``rounding``
        could swap the two largest logits.
        """
        if not (self.sampling.greedy_only and self.defines("logits")):
            return False
        *_, second, first = sorted(logits := self.logits(tokens, mix))
        return bool(first - second < 2 * self.rounding * max(map(abs, logits)))

    @optional
    @returns(
        are_floats,
        "a list of numbers, one for each token, of which there are {least} or more",
        minimum="vocabulary",
    )
    def logits(self, tokens: Sequence[int], mix: Any) -> Sequence[float]:
        """Return the logits of the token after these, computed by the model alone.

        They are kept for other mixes, as the result of ``generate_alone`` is. Each token of a
        request must then be allowed by its parameters, as the harness's own sampling code computes
        them.
        """


def eos_tokens(adapter: type[Any]) -> tuple[int, ...]:
    """Return the tokens that end a text of an engine; none if they are unknown."""
    first = () if adapter.eos_token is None else (adapter.eos_token,)
    return (*first, *adapter.other_eos_tokens)


# Reference implementation of sampling


_SUM_ERROR = 1e-6
"""Largest error of a sum of probabilities in float32."""


def log_probabilities(logits: Floats) -> Floats:
    """Return the log-softmax of logits."""
    below = logits - logits.max()
    shifted: Floats = below - np.log(np.exp(below).sum())
    return shifted


def distribution(logits: Floats, sampling: Any, tokens: Sequence[int], prompted: int) -> Floats:
    """Return the log-probability of sampling each token; -infinity for an excluded one."""
    scaled = _scaled(logits, sampling, tokens, prompted)
    mask = _sampled_tokens(scaled, sampling, room=0.0)
    if sampling.temperature == 0:
        mask = np.arange(len(scaled)) == scaled.argmax()  # the first of several
    return log_probabilities(np.where(mask, scaled, -np.inf))


def may_be_chosen(
    logits: Floats, sampling: Any, tokens: Sequence[int], prompted: int, rounding: float
) -> Mask:
    """Mark the tokens that may follow ``tokens``, whose first ``prompted`` ones are the prompt.

    The engine's logits may differ from these by ``rounding`` times the largest, so a token this
    close to a bound may lie on either side of it. Each of several tied tokens may be chosen.
    """
    scaled = _scaled(logits, sampling, tokens, prompted)
    largest = float(np.abs(scaled[np.isfinite(scaled)]).max())
    return _sampled_tokens(scaled, sampling, room=2 * rounding * largest)


def _scaled(logits: Floats, sampling: Any, tokens: Sequence[int], prompted: int) -> Floats:
    """Adjust logits as each capability does, and divide them by the temperature."""
    scaled = np.array(logits, dtype=np.float64)
    for capability in capabilities_of_fields(type(sampling)):
        if capability.adjust:
            scaled = capability.adjust(scaled, sampling, tokens, prompted)
    divided: Floats = scaled / (sampling.temperature or 1.0)
    return divided


def penalise(
    logits: Floats,
    sampling: SamplingFields,
    tokens: Sequence[int],
    prompted: int,
) -> Floats:
    """Return logits with penalties for ``tokens``, whose first ``prompted`` ones are the prompt."""
    logits, before = logits.copy(), np.unique(np.asarray(tokens, dtype=np.int64))
    penalty = sampling.repetition_penalty
    logits[before] = np.where(
        logits[before] > 0, logits[before] / penalty, logits[before] * penalty
    )
    for token, count in Counter(tokens[prompted:]).items():
        logits[token] -= sampling.presence_penalty
        logits[token] -= count * sampling.frequency_penalty
    return logits


def _sampled_tokens(scaled: Floats, sampling: SamplingFields, *, room: float) -> Mask:
    """Mark the tokens that no bound excludes by more than ``room``; the argmax always stays."""
    argmax: Mask = scaled >= scaled.max() - room
    if sampling.temperature == 0:
        return argmax
    mask: Mask = np.ones(len(scaled), dtype=np.bool_)
    if 0 < sampling.top_k < len(scaled):
        mask = scaled >= np.sort(scaled)[-sampling.top_k] - room
    if sampling.top_p < 1:
        mask &= _within_top_p(np.where(mask, scaled, -np.inf), sampling.top_p, room)
    if sampling.min_p > 0:
        mask &= scaled >= scaled.max() + np.log(sampling.min_p) - room
    mask |= argmax
    return mask


def _within_top_p(scaled: Floats, top_p: float, room: float) -> Mask:
    """Mark the tokens of the nucleus, in any order of those whose logits tie within ``room``."""
    descending = np.sort(scaled)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(np.exp(log_probabilities(descending)))])
    clearly_above = np.searchsorted(-descending, -(scaled + room), side="left")
    slack = _SUM_ERROR if room else 0.0
    within: Mask = sums[clearly_above] * np.exp(-2 * room) - slack < top_p
    return within


def logits_of(adapter: Any, tokens: Sequence[int], mix: Any) -> Floats:
    """Return the logits of the token after these, by the adapter's model, as an array."""
    return floats(adapter.logits(tokens, mix))


def permitted_logits(
    adapter: Any, sampling: Any, tokens: Sequence[int], prompted: int, mix: Any
) -> Floats:
    """Return the logits of the token after these, -infinity for one that a capability excludes."""
    logits = logits_of(adapter, tokens, mix)
    for capability in capabilities_of_fields(type(sampling)):
        permit = capability.permit
        permitted = permit(adapter, sampling, tokens[prompted:]) if permit else None
        if permitted:
            excluded = np.ones(len(logits), dtype=np.bool_)
            excluded[[*permitted]] = False
            logits = np.where(excluded, -np.inf, logits)
    return logits


class ChosenTokens(MixObserver):
    """Judge of tokens, which the parameters of their request must allow."""

    any_of = ("logits",)

    def judge(self, served: ServedRequest) -> str:
        prompt, sampling = served.spec.prompt, served.spec.sampling
        for at in served.new_tokens:
            before, token = [*prompt, *served.tokens[:at]], served.tokens[at]
            adapter, rounding = self.run.adapter, self.run.adapter.rounding
            logits = permitted_logits(adapter, sampling, before, len(prompt), self.run.mix)
            allowed = may_be_chosen(logits, sampling, before, len(prompt), rounding)
            if not (0 <= token < len(allowed) and allowed[token]):
                choices = np.flatnonzero(allowed).tolist()
                return (
                    f"{served.name}, token {at}: {token}, which its parameters rule out: "
                    f"they allow {choices}"
                )
        return ""


# Drawing, describing and settling of parameters


HOTTEST = 30.0
"""Temperature that samples unlikely tokens too, while top-k and top-p are off."""
_NUCLEI = ((0, 1.0), (1, 1.0), (5, 1.0), (5, 0.8), (0, 0.8))
"""Pairs of top-k and top-p."""
_PENALTIES: tuple[dict[str, float], ...] = (
    *({},) * 6,
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"presence_penalty": -1.0, "frequency_penalty": 2.0},
)
_SEEDS = 24
"""Most seeds that are tried until a text ends early."""
_FIRST_SEEDS = 64
"""Most seeds that are tried until the first token ends a text."""


def draw_parameters(draw: st.DrawFn, max_tokens: int) -> dict[str, Any]:
    """Draw the parameters of a request for up to ``max_tokens`` tokens."""
    temperature = draw(st.sampled_from((0.0, 0.0, 1.0, 3.0, HOTTEST)))
    top_k, top_p = draw(st.sampled_from(_NUCLEI)) if temperature < HOTTEST else (0, 1.0)
    return {
        # A single new token leaves only the blocks of the prompt.
        "max_new_tokens": draw(st.one_of(st.just(1), st.integers(1, max_tokens))),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": draw(st.sampled_from((1.0, 1.0, 1.5, 4.0))),
        "seed": draw(st.integers(0, 3)),
        "ignore_eos": draw(st.booleans()),
    }


def draw_more(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    """Draw large seeds, and the parameters that only some engines support."""
    if spec.sampling.temperature and draw(st.sampled_from((False, False, False, True))):
        spec = change(spec, seed=draw(st.sampled_from(_large_seeds(adapter.sampling.max_seed))))
    if adapter.sampling.min_p and 0 < spec.sampling.temperature < HOTTEST:
        spec = change(spec, min_p=draw(st.sampled_from((0.0, 0.05, 0.4))))
    if adapter.sampling.presence_and_frequency:
        spec = change(spec, **draw(st.sampled_from(_PENALTIES)))
    return spec


def _large_seeds(max_seed: int) -> list[int]:
    """Return seeds that differ from small ones in high bits alone, up to ``max_seed``."""
    seeds = (32, 256 + 1, 2**16 + 2, 2**31 + 3, 2**32 + 1, 2**53 + 1)
    return [*(seed for seed in seeds if seed < max_seed), max_seed]


def restrict_to_greedy(adapter: type[Any], spec: Any) -> Any:
    """Return a greedy request for an engine that supports no other."""
    if not adapter.sampling.greedy_only:
        return spec
    greedy = {name: getattr(SamplingFields, name) for name in get_annotations(SamplingFields)}
    if not eos_tokens(adapter):
        greedy |= dict.fromkeys(get_annotations(EarlyEndFields), False)
    return change(spec, **greedy)


def describe(spec: Any) -> Iterator[str]:
    """Describe the sampling parameters of a request."""
    sampling: SamplingFields = spec.sampling
    if sampling.temperature:
        yield f"drawn at temperature {sampling.temperature} from seed {sampling.seed}"
    if sampling.top_k > 0:
        yield f"top_k {sampling.top_k}"
    if sampling.top_p < 1:
        yield f"top_p {sampling.top_p}"
    if sampling.repetition_penalty != 1:
        yield f"repetition penalty {sampling.repetition_penalty}"
    if sampling.min_p > 0:
        yield f"min_p {sampling.min_p}"
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, name):
            yield f"{name.replace('_', ' ')} {value}"
    if spec.ends_early:
        yield "with the next seed that ends the text early"
    if spec.ends_first:
        yield "with the next seed whose first token ends the text"


def settle_early_end(
    adapter: Any, spec: Any, expected: list[int], mix: Any
) -> tuple[Any, list[int]]:
    """Find the next seed, or last token of the prompt, that ends the text as early as it should."""
    if spec.ends_first:
        trial = change(spec, max_new_tokens=2)
        for _ in range(_FIRST_SEEDS):
            if len(adapter.generate_alone(trial.prompt, trial.sampling, mix)) < 2:
                break
            trial = _next_trial(adapter, trial)
        spec = change(trial, max_new_tokens=spec.sampling.max_new_tokens)
        expected = [*adapter.generate_alone(spec.prompt, spec.sampling, mix)]
    elif spec.ends_early:
        for _ in range(_SEEDS):
            if 1 < len(expected) < spec.sampling.max_new_tokens:
                break
            spec = _next_trial(adapter, spec)
            expected = [*adapter.generate_alone(spec.prompt, spec.sampling, mix)]
    return change(spec, ends_early=False, ends_first=False), expected


def _next_trial(adapter: Any, spec: Any) -> Any:
    """Return the request with the next seed, or with another last token for a greedy engine."""
    if not adapter.sampling.greedy_only:
        return change(spec, seed=spec.sampling.seed + 1)
    *first, last = spec.prompt
    return change(spec, prompt=(*first, (last + 1) % adapter.vocabulary))


def refuse_no_twin(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for an adapter without a slow twin."""
    by_logits = "logits" in adapter.abilities and adapter.sampling.greedy_only
    if not by_logits and "generate_alone" not in adapter.abilities:
        raise TypeError(
            f"{adapter.__name__} must define generate_alone, or logits where "
            "sampling.greedy_only is True"
        )


SAMPLING = EngineCapability(
    methods=SamplingMethods,
    renamed={
        "alone": "generate_alone(prompt, sampling, mix)",
        "undecided": "is_near_tie(tokens, sampling, mix)",
        "takes_sampling": "sampling = SamplingTraits(greedy_only=True) for False, else nothing",
        "takes_min_p": "sampling = SamplingTraits(min_p=True)",
        "takes_counted_penalties": "sampling = SamplingTraits(presence_and_frequency=True)",
        "end": "eos_token",
    },
    fields=(SamplingFields, EarlyEndFields),
    draw=draw_more,
    restrict=restrict_to_greedy,
    describe=describe,
    settle=settle_early_end,
    adjust=penalise,
    observers=(ChosenTokens,),
    refuse=(refuse_no_twin,),
)
