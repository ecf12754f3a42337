"""Bugs in storing short prompts as rows that decode."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_PROMPTS = "roseinfer.engine.runner"
_ROWS = "roseinfer.decode.step"


def _mutant(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "prompt-told-by-its-first-row",
        "What follows a prompt in rows is what its first token is followed by.",
        _PROMPTS,
        "PromptRows.launch",
        "rows.append(end - 1)",
        "rows.append(end - count)",
    ),
    _mutant(
        "half-a-prompt-in-rows-is-whole",
        "A chunk of a prompt in rows chooses a token, though more of the prompt is to come.",
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
        "prompt-in-rows-from-its-beginning",
        "Of a prompt whose beginning is stored, rows store the beginning again behind it.",
        _PROMPTS,
        "PromptRows.launch",
        "tokens = session.token_ids[session.stored : session.stored + count]",
        "tokens = session.token_ids[:count]",
    ),
    _mutant(
        "rows-as-wide-as-the-shortest",
        "Rows are given as many blocks as the shortest sequence has.",
        _ROWS,
        "MultiTokenDecode._table_width",
        "return max(len(each.session.block_lists[0]) for each in spans)",
        "return min(len(each.session.block_lists[0]) for each in spans)",
    ),
    _mutant(
        "rows-of-several-groups-as-wide-as-one",
        "Rows are given no blocks of the second group of layers.",
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
        "Prompts whose tokens count for penalties are stored as rows, which know of none.",
        _PROMPTS,
        "PromptRows.fit",
        """
        return 0 < sum(count for _, count in chunks) <= self._most and all(
            request.session.stored + count <= _LONGEST
            and request.guide is None
            and not request.params.penalised
            and not request.wants_prompt
            for request, count in chunks
        )
        """,
        """
        return 0 < sum(count for _, count in chunks) <= self._most and all(
            request.session.stored + count <= _LONGEST
            and request.guide is None
            and not request.wants_prompt
            for request, count in chunks
        )
        """,
    ),
)
