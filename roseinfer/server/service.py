"""What all endpoints share: the engine, how prompts are read, and what is let in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, ConfigError
from roseinfer.server.auth import Admission
from roseinfer.server.generation import Generation
from roseinfer.server.metrics import HttpCounts, MetricsPage, TextCounts
from roseinfer.server.prompts import Prompts
from roseinfer.server.refusals import Refused
from roseinfer.server.schemas.choices import TokenTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.config import ServerConfig
    from roseinfer.engine_client.protocol import ServedEngine
    from roseinfer.guided.guide import Guide
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.server.prompts import Prompt
    from roseinfer.server.schemas.validation import Asked


MOST_LOGPROBS = 1 << 21
"""Log-probabilities of one answer, each of some 50 bytes or more."""


class Service:
    """Serves one engine, under one name or several."""

    def __init__(
        self,
        served: ServedEngine,
        names: Sequence[str],
        config: ServerConfig,
        chat_template: str | None = None,
        number: int = 0,
    ) -> None:
        """``number`` is that of this replica, where there are several."""
        facts = served.facts
        if facts.tokenizer is None:
            raise ConfigError(f"{names[0]} has no tokenizer, so there are no texts to serve")
        self.config = config
        self.names = tuple(names)
        self.served = served
        self.prompts = Prompts(facts, config.max_prompt_tokens, chat_template)
        self.admission = Admission(facts.max_batch_size, config.max_queue)
        self.token_texts = TokenTexts(facts.tokenizer)
        self.vocabulary = facts.shape.vocab_size
        self.most_tokens = facts.room.most_new(1) + 1
        """Of a prompt and its text together."""
        self._why_batch_variant = facts.why_batch_variant
        self.metrics = TextCounts(self.most_tokens)
        self.http_counts = HttpCounts()
        self.metrics_page = MetricsPage(
            self.metrics, self.http_counts, served, self.names[0], number
        )
        self._since = int(time.time())

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        return self.unready is None

    @property
    def alive(self) -> bool:
        return self.dead is None

    @property
    def unready(self) -> str | None:
        """Reason why no requests are taken; None while they are."""
        if self.dead is None and self.served.restarting:
            return "the engine is started again"
        return self.dead or ("the server is draining" if self.admission.draining else None)

    @property
    def dead(self) -> str | None:
        """Reason why the engine serves nothing, and may never do so again; None while it does."""
        if self.served.closed:
            return "the engine has stopped"
        if (seconds := self.served.stalled_s) > self.config.stall_seconds:
            return f"the engine has work, and has done no step for {seconds:.0f} s"
        return None

    def cut(self) -> None:
        """End the texts that are left with an error, and the prompts that are not read yet."""
        self.prompts.cut()
        self.served.close()

    def close(self) -> None:
        """End the engine, and the threads of prompts."""
        self.served.close()
        self.prompts.close()

    def models(self) -> list[dict[str, object]]:
        return [
            {
                "id": name,
                "object": "model",
                "created": self._since,
                "owned_by": "roseinfer",
                "max_model_len": self.most_tokens,
                "batch_invariant": self._why_batch_variant is None,
                "why_batch_variant": self._why_batch_variant,
            }
            for name in self.names
        ]

    def require_model(self, name: str) -> None:
        if name not in self.names:
            known = ", ".join(self.names)
            why = f"there is no such model here: this server has {known}"
            raise Refused(404, why, param="model", code="model_not_found")

    async def guide_of(self, body: Asked) -> Guide | None:
        """Return the form that texts must have, which can be followed, or raise a refusal."""
        try:
            guide = body.guide()
            if guide is not None:
                await self.served.check_guide(guide)
        except (BadArgument, ConfigError) as error:
            field = body.guided_by
            raise Refused(400, f"{field}: {error}", param=field, code="invalid_value") from None
        return guide

    def generation(
        self, body: Asked, prompts: Sequence[Prompt], guide: Guide | None, began: float
    ) -> Generation:
        """Return what generates the texts of a request, which came when it was ``began``."""

        def params_of(prompt: Prompt, choice: int) -> SamplingParams:
            return body.params(min(prompt.room, body.most_tokens or prompt.room), choice, guide)

        self._refuse_too_many_logprobs(body, prompts)
        return Generation(
            self.served,
            self.metrics,
            prompts,
            body.choices,
            params_of,
            lambda: self.admission.open,
            began=began,
            prompts_only=body.prompts_only,
        )

    @staticmethod
    def _refuse_too_many_logprobs(body: Asked, prompts: Sequence[Prompt]) -> None:
        """Refuse an answer that may get too large, before anything is generated."""
        wanted = body.wanted_logprobs(0)
        if not wanted.get("logprobs"):
            return
        tokens = sum(
            min(prompt.room, body.most_tokens or prompt.room)
            + len(prompt.token_ids) * wanted.get("prompt_logprobs", False)
            for prompt in prompts
        )
        each = 1 + wanted.get("top_logprobs", 0)
        count = body.choices * tokens * each
        if count > MOST_LOGPROBS:
            why = (
                f"logprobs: {body.choices} choices of {tokens} tokens with {each} "
                f"log-probabilities each are {count}, and an answer has at most {MOST_LOGPROBS}: "
                "ask for fewer choices, tokens or likeliest tokens"
            )
            raise Refused(400, why, param="logprobs", code="invalid_value")
