"""Tries a tokenizer that decodes by code of its own: what comes in pieces must be the whole text.

Nothing is known of such code. So it decodes some tokens drawn at random, and a tokenizer is refused
where its text in pieces is another than that of all tokens at once.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from roseinfer.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.text.detokenizer import DecodesInPieces

_TEXTS = 48
_LENGTH = 24
_FIRST = 300
"""Bytes and punctuation are mostly among so many first tokens."""


def decodes_by_its_own_code(tokenizer: Any) -> bool:
    """Return whether more than the decoder that was saved with a tokenizer makes its texts."""
    usual, kind = PreTrainedTokenizerFast, type(tokenizer)
    names = ("decode", "_decode")
    return any(getattr(kind, name, None) is not getattr(usual, name) for name in names)


def require_agreement(tokenizer: Any, new_detokenizer: Callable[[], DecodesInPieces]) -> None:
    """Raise if a text that comes in pieces differs from the one that the tokenizer decodes."""
    draw = Random(0)
    for at in range(_TEXTS):
        below = min(len(tokenizer), _FIRST) if at % 2 else len(tokenizer)
        tokens = [draw.randrange(below) for _ in range(_LENGTH)]
        try:
            whole = tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            detokenizer = new_detokenizer()
            pieces = [*map(detokenizer.add, tokens), detokenizer.flush()]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise _refused(tokenizer, f"cannot decode tokens ({error})") from error
        if "".join(pieces) != whole:
            raise _refused(tokenizer, "decodes tokens otherwise when more follow")


def _refused(tokenizer: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer ({type(tokenizer).__name__}) {why}, so its texts cannot come in pieces: "
        "give another tokenizer, or a model without one and token ids"
    )
