"""Service shared by all endpoints: engine client, prompt encoder, admission and metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, ConfigError
from roseinfer.server.api_errors import ApiError
from roseinfer.server.auth import Admission
from roseinfer.server.generation import Generation
from roseinfer.server.metrics import CompletionMetrics, HttpMetrics, MetricsPage
from roseinfer.server.prompts import PromptEncoder
from roseinfer.server.schemas.choices import TokenTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.config import ServerConfig
    from roseinfer.engine_client.protocol import EngineClient
    from roseinfer.guided.guide import Guide
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.server.prompts import Prompt
    from roseinfer.server.schemas.validation import RequestBody


MAX_LOGPROBS = 1 << 21
"""Logprobs per response, at most; each takes 50 bytes or more."""


class Service:
    """Service of one engine, under one or more model names."""

    def __init__(
        self,
        engine_client: EngineClient,
        names: Sequence[str],
        config: ServerConfig,
        chat_template: str | None = None,
        number: int = 0,
    ) -> None:
        """Prepare to serve; ``number`` is that of this replica, 0 if it is the only one."""
        info = engine_client.info
        if info.tokenizer is None:
            raise ConfigError(f"{names[0]}: the model has no tokenizer; serve one that has")
        self.config = config
        self.names = tuple(names)
        self.engine_client = engine_client
        self.prompts = PromptEncoder(info, config.max_prompt_tokens, chat_template)
        self.admission = Admission(info.max_batch_size, config.max_queue)
        self.token_texts = TokenTexts(info.tokenizer)
        self.vocabulary = info.shape.vocab_size
        self.max_model_len = info.request_limits.max_new_tokens_after(1) + 1
        """Tokens of a prompt and its completion together, at most."""
        self._batch_variance_reason = info.batch_variance_reason
        self.metrics = CompletionMetrics(self.max_model_len)
        self.http_counts = HttpMetrics()
        self.metrics_page = MetricsPage(
            self.metrics, self.http_counts, engine_client, self.names[0], number
        )
        self._created = int(time.time())

    @property
    def ready(self) -> bool:
        """True while requests are accepted."""
        return self.unready is None

    @property
    def alive(self) -> bool:
        return self.stopped_reason is None

    @property
    def unready(self) -> str | None:
        """Reason why no requests are accepted; None while they are."""
        if self.stopped_reason is None and self.engine_client.restarting:
            return "the engine is restarting"
        return self.stopped_reason or (
            "the server is draining" if self.admission.draining else None
        )

    @property
    def stopped_reason(self) -> str | None:
        """Reason why the engine has stopped, maybe for good; None while it serves."""
        if self.engine_client.closed:
            return "the engine has stopped"
        if (seconds := self.engine_client.stalled_s) > self.config.stall_seconds:
            return f"the engine is stalled: it has work, but no step for {seconds:.0f} s"
        return None

    def abort(self) -> None:
        """Fail the open completions, and the prompts that are not encoded yet."""
        self.prompts.abort()
        self.engine_client.close()

    def close(self) -> None:
        """Close the engine client, and end the threads that encode prompts."""
        self.engine_client.close()
        self.prompts.close()

    def models(self) -> list[dict[str, object]]:
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "roseinfer",
                "max_model_len": self.max_model_len,
                "batch_invariant": self._batch_variance_reason is None,
                "batch_variance_reason": self._batch_variance_reason,
            }
            for name in self.names
        ]

    def require_model(self, name: str) -> None:
        if name not in self.names:
            message = f"unknown model; this server has {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def prepare_guide(self, body: RequestBody) -> Guide | None:
        """Return the guide of a request's completions, checked by the engine; None without one."""
        try:
            guide = body.guide()
            if guide is not None:
                await self.engine_client.check_guide(guide)
        except (BadArgument, ConfigError) as error:
            field = body.guide_field
            raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from None
        return guide

    def generation(
        self, body: RequestBody, prompts: Sequence[Prompt], guide: Guide | None, received_at: float
    ) -> Generation:
        """Return the generation of a request; ``received_at`` is by ``time.perf_counter``."""

        def params_of(prompt: Prompt, choice: int) -> SamplingParams:
            return body.params(
                min(prompt.max_new_tokens, body.requested_max_tokens or prompt.max_new_tokens),
                choice,
                guide,
            )

        self._refuse_too_many_logprobs(body, prompts)
        return Generation(
            self.engine_client,
            self.metrics,
            prompts,
            body.num_choices,
            params_of,
            lambda: self.admission.num_open,
            received_at=received_at,
            prefill_only=body.prefill_only,
        )

    @staticmethod
    def _refuse_too_many_logprobs(body: RequestBody, prompts: Sequence[Prompt]) -> None:
        """Refuse a request whose response may have too many logprobs, before it is generated."""
        logprob_params = body.logprob_params(0)
        if not logprob_params.get("logprobs"):
            return
        tokens = sum(
            min(prompt.max_new_tokens, body.requested_max_tokens or prompt.max_new_tokens)
            + len(prompt.token_ids) * logprob_params.get("prompt_logprobs", False)
            for prompt in prompts
        )
        each = 1 + logprob_params.get("top_logprobs", 0)
        count = body.num_choices * tokens * each
        if count > MAX_LOGPROBS:
            message = (
                f"logprobs: {body.num_choices} choices of {tokens} tokens with {each} logprobs "
                f"each make {count}; the limit is {MAX_LOGPROBS}: request fewer choices, tokens or "
                "top logprobs"
            )
            raise ApiError(400, message, param="logprobs", code="invalid_value")
