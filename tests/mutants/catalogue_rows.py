"""Bugs in storing short prompts as rows of decode steps."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_PROMPTS = "roseinfer.engine.runner"
_ROWS = "roseinfer.decode.step"


def _mutant(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "next-token-from-the-first-row",
        "A prompt in rows gets its next token from the logits of its first token.",
        _PROMPTS,
        "PromptRows.launch",
        "rows.append(end - 1)",
        "rows.append(end - count)",
    ),
    _mutant(
        "partial-prompt-in-rows-samples",
        "A chunk of a prompt in rows chooses a token, though the prompt is incomplete.",
        _PROMPTS,
        "PromptRows.launch",
        """
        if request.pending == count:
            ...
        """,
        """
        if request.pending:
            ...
        """,
    ),
    _mutant(
        "prefix-in-rows-stored-again",
        "Rows store the prefix of a prompt again, after the stored one.",
        _PROMPTS,
        "PromptRows.launch",
        "spans.append(_span_of(request, count))",
        """
        own = request.sequence.token_ids[:count]
        spans.append(_span_of(request, count)._replace(tokens=own))
        """,
    ),
    _mutant(
        "rows-as-wide-as-the-shortest",
        "Rows have as many blocks as the shortest sequence.",
        _ROWS,
        "MultiTokenDecode._table_width",
        "return max(len(each.session.block_lists[0]) for each in spans)",
        "return min(len(each.session.block_lists[0]) for each in spans)",
    ),
    _mutant(
        "rows-of-several-groups-as-wide-as-one",
        "Rows have no blocks of the second group of layers.",
        _ROWS,
        "MultiTokenDecode._table_width",
        """
        if self._rows.groups > 1:
            ...
        """,
        """
        if self._rows.groups > 2:
            ...
        """,
    ),
    _mutant(
        "penalties-forgotten-in-rows",
        "Prompts with penalties are stored as rows, which apply none.",
        _PROMPTS,
        "PromptRows.split_into_launches",
        """
        if (
            count > self._max_tokens
            or request.guide is not None
            or request.params.has_penalties
            or request.needs_prompt_logprobs
        ):
            return []
        """,
        """
        if (
            count > self._max_tokens
            or request.guide is not None
            or request.needs_prompt_logprobs
        ):
            return []
        """,
    ),
    _mutant(
        "slots-take-tokens-of-the-last-launch",
        "Prompts enter slots after all launches of rows, with tokens that the last one chose.",
        _PROMPTS,
        "StepRunner.launch",
        """
        for launch in launches:
            flights += self._launch_in_rows(launch)
        """,
        """
        launched = [self._prompt_rows.launch(launch) for launch in launches]
        tokens, size = self._prompt_rows.tokens, self._sequence_runner.model.shape.vocab_size
        for complete, rows, arrival, logprobs in launched:
            if complete:
                stay = self._assign_slots(complete, rows, tokens, size)
                flights.append(TokensInFlight(complete, rows, arrival, logprobs, stay))
        """,
    ),
)
