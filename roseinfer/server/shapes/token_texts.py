"""What single tokens are as text, and their log-probabilities as OpenAI writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.text.byte_level import BYTE_OF
from roseinfer.text.token_steps import BYTE_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine_process.part import Likeliest


class TokenTexts:
    """The text and the bytes of each token, which are made when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        # It imports transformers, which the process that serves HTTP does not wait for.
        from roseinfer.text.request_text import detokenizers

        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._special: dict[int, str] = {}
        self.detokenizer = detokenizers(tokenizer)
        """Makes what decodes one text token by token, as the engine does."""

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def special(self, token: int) -> str:
        """Return what a token is written as that only prompts show; nothing for any other."""
        if token not in self._special:
            shown = self._tokenizer.decode([token], skip_special_tokens=True)
            self._special[token] = "" if shown else self[token][0]
        return self._special[token]

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        text: str = self._tokenizer.decode([token])
        if "\N{REPLACEMENT CHARACTER}" in text:  # part of a character
            data = _bytes_of(self._tokenizer.convert_ids_to_tokens(token) or "")
            if data:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)
        return text, list(text.encode())

    def of_chat(
        self, tokens: Sequence[int], logprobs: Sequence[float], likeliest: Sequence[Likeliest]
    ) -> dict[str, list[Any]]:
        """Return the log-probabilities of tokens as a chat completion has them."""
        tops = likeliest or [[]] * len(tokens)
        content = [
            self._told(token, logprob)
            | {"top_logprobs": [self._told(other, own) for other, own in top]}
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]
        return {"content": content}

    def of_completion(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        likeliest: Sequence[Likeliest] | None,
        offsets: list[int],
    ) -> dict[str, list[Any]]:
        """Return them as a completion has them. ``offsets`` are where the tokens begin.

        ``likeliest`` is None if log-probabilities of other tokens were not asked for.
        """
        found: dict[str, list[Any]] = {
            "tokens": [self[token][0] for token in tokens],
            "token_logprobs": [*logprobs],
            "text_offset": offsets,
        }
        if likeliest is not None:
            found["top_logprobs"] = [
                None
                if logprob is None
                else {self[other][0]: own for other, own in (*top, (token, logprob))}
                for token, logprob, top in zip(tokens, logprobs, likeliest, strict=True)
            ]
        return found

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self[token]
        return {"token": text, "logprob": logprob, "bytes": data}


def _bytes_of(written: str) -> bytes:
    """Return the bytes of a token that is a part of a character; none if nobody knows them."""
    if found := BYTE_TOKEN.fullmatch(written):
        return bytes([int(found[1], 16)])
    known = all(character in BYTE_OF for character in written)
    return bytes(BYTE_OF[character] for character in written) if known else b""
