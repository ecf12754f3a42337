"""Known findings: a file of failures that are expected, and the digests that identify them.

A digest is made of the target, what was checked and how it differed. It has nothing of the
history, so every history that shows the same defect has the same digest once it is shrunk.
"""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.settings import KnownFinding
from pytest_roseinfer.words import OptionError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DIGITS = 10
_DIGEST = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")
_FIELDS: Mapping[str, type] = {
    **dict.fromkeys(("target", "test", "reason", "link"), str),
    "strict": bool,
}
_REQUIRED = ("target", "test", "reason")


def read_known(file: Path) -> dict[str, KnownFinding]:
    """Return the known findings in a file, by digest; raise ``OptionError`` if it is invalid."""
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{file}: {error}") from None
    return {digest: _entry(file, digest, entry) for digest, entry in entries.items()}


def _entry(file: Path, digest: str, entry: Any) -> KnownFinding:
    if not (_DIGEST.fullmatch(digest) and isinstance(entry, dict)):
        raise OptionError(
            f"{file}: {digest} is not a known finding; expected a table such as [{'0' * _DIGITS}], "
            "as a failure prints it"
        )
    for name, value in entry.items():
        if name not in _FIELDS:
            raise OptionError(
                f"{file}: {digest} has an unknown key {name}{did_you_mean(name, _FIELDS)}"
            )
        if not isinstance(value, _FIELDS[name]):
            raise OptionError(f"{file}: {digest}.{name} must be a {_FIELDS[name].__name__}")
    if missing := [name for name in _REQUIRED if not entry.get(name)]:
        raise OptionError(f"{file}: {digest} has no {' and no '.join(missing)}")
    return KnownFinding(digest, **entry)


# Digests.


def kind_of(failure: BaseException) -> str:
    """Return what was checked and how it differed; for an error, its class."""
    return getattr(failure, "kind", "") or f"raised {type(failure).__name__}"


def digest_of(target: str, failure: BaseException) -> str:
    """Return the digest of a shrunk failure of a target."""
    return sha256(f"{target}\n{kind_of(failure)}".encode()).hexdigest()[:_DIGITS]


def describe_entry(digest: str, target: str, test: str) -> str:
    """Return the lines for the file that make a failure a known finding."""
    return (
        f"digest {digest}; a known finding has an entry in {settings.current().known_file}:\n"
        f"  [{digest}]\n"
        f'  target = "{target}"\n'
        f'  test = "{test}"\n'
        '  reason = ""\n'
        '  link = ""'
    )
