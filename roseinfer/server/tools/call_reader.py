"""Tells what a text says from the function that it calls, while the text is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TAG = "<tool_call>"
_BARE = re.compile(r'[ \n\r\t]*\{[ \n\r\t]*"name"')
_MAY_BE_BARE = re.compile(r'[ \n\r\t]*(\{[ \n\r\t]*("(n(a(m(e)?)?)?)?)?)?')
_BEGIN = re.compile(
    rf'(?:{_TAG})?\s*\{{\s*"name"\s*:\s*"(?P<name>[\w-]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(slots=True)
class Said:
    """What a piece of a text came to."""

    content: str = ""
    name: str | None = None
    """The function that is called, in the piece that says so."""
    arguments: str = ""


class CallReader:
    """Reads one text, of the form that ``tool_guide`` gives it."""

    def __init__(self) -> None:
        self._held = ""
        """What may still become the beginning of a call."""
        self._said_something = False
        self._in_call = False
        self._name: str | None = None
        self._depth = 0
        """How many braces and brackets of the arguments are open."""
        self._quoted = self._escaped = False
        self.complete = False
        """True when all arguments of a call are there."""

    def read(self, text: str, *, last: bool) -> Said:
        """Take more text, and return what is certain. The ``last`` leaves nothing open."""
        said = Said()
        self._held += text
        if not self._in_call:
            self._say(said)
        if self._in_call and self._name is None and (begun := _BEGIN.match(self._held)):
            self._name = said.name = begun["name"]
            self._held = self._held[begun.end() :]
        if self._name is not None:
            said.arguments = self._arguments()
        elif last:
            said.content += self._held
            self._held = ""
        return said

    def _say(self, said: Said) -> None:
        """Let go of what is no call."""
        before, tag, behind = self._held.partition(_TAG)
        if not self._said_something and _BARE.match(self._held):
            self._in_call = True
        elif tag:
            said.content = before if self._said_something or before.strip() else ""
            self._held, self._in_call = tag + behind, True
        elif self._said_something or not _MAY_BE_BARE.fullmatch(self._held):
            keep = next(n for n in range(len(_TAG) - 1, -1, -1) if self._held.endswith(_TAG[:n]))
            certain = len(self._held) - keep
            if self._said_something or self._held[:certain].strip():
                said.content, self._held = self._held[:certain], self._held[certain:]
                self._said_something |= bool(said.content)

    def _arguments(self) -> str:
        """Return more of the arguments, up to the brace that ends them."""
        text, self._held = self._held, ""
        if self.complete:
            return ""
        for at, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.complete = True
                    return text[: at + 1]
        return text
