"""Variants of the adapters of transformers that fail on one defect each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_roseinfer.engine_capabilities.prefix_reuse import PrefixReuseTraits
from pytest_roseinfer.targets import engine_models
from pytest_roseinfer.targets.transformers_engine import TransformersEngine
from tests.others.family_models import logits_of, model_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer import RequestMix, Sampling

# Models that ``generate_batch`` serves.


def _eager(name: str) -> Mapping[str, Sequence[Any]]:
    """Return the engine's options with this model, which has no other attention."""
    return {**TransformersEngine.option_choices, "model": (name,), "attention": ("eager",)}


class ServesSoftCaps(TransformersEngine):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = _eager(engine_models.SOFTCAP)


class ServesItsOwnAttention(TransformersEngine):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = _eager(engine_models.ALIBI)


class ServesFamily(TransformersEngine):
    """Serves a model of a family, and compares it with the model without a cache."""

    def __init_subclass__(cls, model: str = "", **_: Any) -> None:
        super().__init_subclass__()
        cls.option_choices = {**TransformersEngine.option_choices, "model": (model,)}

    def served_model(self, name: str, device: str) -> Any:  # noqa: ARG002
        return model_of(name)

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        return logits_of(mix.options["model"], tuple(tokens))


class ServesLongRope(ServesFamily, model="Phi3"):
    pass


class AttendsTwice(ServesFamily, model="DiffLlama"):
    pass


class SeesFiveTokens(ServesFamily, model="Mistral"):
    pass


class SeesOneToken(ServesFamily, model="Mistral with a window of one"):
    pass


# Its cache, and what its requests want.


class SmallerCache(TransformersEngine):
    """Builds a cache of half the size that it declares."""

    def make(self, mix: RequestMix) -> None:
        super().make(replace(mix, cache_tokens=mix.cache_tokens // 2))


class CompletesTwice(TransformersEngine):
    """Wants two completions of each prompt."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.manager.num_return_sequences = 2


class FindsStoredPrompts(TransformersEngine):
    """Promises that stored prompts are found."""

    prefix_reuse = PrefixReuseTraits(finds="full blocks", enabled_by={"allow_block_sharing": True})

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.found: dict[str, int] = {}
        """Tokens of each request that a lookup found."""

    def _search(self, search: Callable[[str, list[int]], int], name: str, prompt: list[int]) -> int:
        self.found[name] = super()._search(search, name, prompt)
        return self.found[name]

    def cached_tokens(self, request: Any) -> int:
        return self.found.get(request, 0)


class NamesRequests(TransformersEngine):
    """Names its requests, as clients do."""

    names: ClassVar[Sequence[str]] = ("one", "two", "three")

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.clients: list[SimpleNamespace] = []

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        client = SimpleNamespace(name=self.names[len(self.clients)], received=None)
        for other in self.clients:
            if other.name == client.name:  # which gets no more outputs
                other.received = super().tokens(other.name)
                self.outputs.pop(other.name, None)
        self.clients.append(client)
        add = partial(self.manager.add_request, request_id=client.name)
        with mock.patch.object(self.manager, "add_request", add):
            super().submit(prompt, sampling)
        return client

    def tokens(self, request: Any) -> list[int]:
        if request.received is not None:
            return list(request.received)
        return super().tokens(request.name)

    def is_finished(self, request: Any) -> bool:
        return request.received is None and super().is_finished(request.name)


class NamesTwoAlike(NamesRequests):
    """Gives its first two requests one name, as a client does that tries again."""

    names = ("one", "one", "three")
