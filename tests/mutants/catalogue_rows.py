"""Bugs in storing short prompts as rows that decode."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_PROMPTS = "roseinfer.engine.prompt_rows"
_ROWS = "roseinfer.decode.token_rows"


def _mutant(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "prompt-told-by-its-first-row",
        "What follows a prompt in rows is what its first token is followed by.",
        _PROMPTS,
        "rows.append(end - 1)",
        "rows.append(end - count)",
    ),
    _mutant(
        "half-a-prompt-in-rows-is-whole",
        "A chunk of a prompt in rows chooses a token, though more of the prompt is to come.",
        _PROMPTS,
        "if request.pending == count:",
        "if request.pending:",
    ),
    _mutant(
        "prompt-in-rows-from-its-beginning",
        "Of a prompt whose beginning is stored, rows store the beginning again behind it.",
        _PROMPTS,
        "session.token_ids[session.stored : session.stored + count]",
        "session.token_ids[:count]",
    ),
    _mutant(
        "rows-as-wide-as-the-shortest",
        "Rows are given as many blocks as the shortest sequence has.",
        _ROWS,
        "return max(len(each.session.block_lists[0]) for each in spans)",
        "return min(len(each.session.block_lists[0]) for each in spans)",
    ),
    _mutant(
        "rows-of-several-groups-as-wide-as-one",
        "Rows are given no blocks of the second group of layers.",
        _ROWS,
        "if self._rows.groups > 1:",
        "if self._rows.groups > 2:",
    ),
    _mutant(
        "penalties-forgotten-in-rows",
        "Prompts whose tokens count for penalties are stored as rows, which know of none.",
        _PROMPTS,
        "            and not request.params.penalised\n",
        "",
    ),
)
