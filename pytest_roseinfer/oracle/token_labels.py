"""What stands for a token in a picture, and the place in its text."""

from __future__ import annotations

from pytest_roseinfer.oracle.oracle import TEXTS, token_parts


def token_label(token: int) -> str:
    seq, position, life = token_parts(token)
    if seq >= TEXTS:
        return f"t{seq - TEXTS}{f'(namespace {life})' * bool(life)}.{position}"
    return f"{seq}(life {life + 1}).{position}" if life else f"{seq}.{position}"


def text_place(token: int) -> tuple[int, int, int] | None:
    """Return the text, position and namespace of a token; None if it is no text's."""
    seq, position, life = token_parts(token)
    return (seq - TEXTS, position, life) if seq >= TEXTS else None
