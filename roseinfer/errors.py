"""Exceptions that roseinfer raises. An operation that raised one has changed nothing."""

from __future__ import annotations

from traceback import clear_frames
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class RoseinferError(Exception):
    """Base class of every error that this package raises on purpose.

    Errors can be pickled and raised in another process. Their causes are not pickled: messages
    include the cause where it matters.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), self.args, self.__dict__)


class OutOfBlocks(RoseinferError, RuntimeError):
    """An operation that needs more blocks than the pool has free."""

    def __init__(self, *, needed: int, free: int, owner: str) -> None:
        super().__init__(
            f"{owner} has {free} free blocks and {needed} are needed: "
            "free some sequences, or build the cache with a larger max_blocks_per_layer"
        )
        self.needed = needed
        self.free = free


class BadBlock(RoseinferError, ValueError):
    """A block id that is unknown, free, or of another layer."""


class BadRefcount(RoseinferError, ValueError):
    """A refcount error: more releases of a block, or more lists that append to it, than holders."""


class BadArgument(RoseinferError, ValueError):
    """A shape, length, device, dtype, layer or list that an operation cannot work with."""


class StalePlan(RoseinferError, RuntimeError):
    """A use of an append plan after its index buffers were given to later plans."""


class ConfigError(RoseinferError, ValueError):
    """An invalid setting, from code or from the environment."""


class TritonUnavailable(UserWarning):
    """A warning that Triton cannot run here; torch operations write instead."""


class UnsupportedModel(RoseinferError, ValueError):
    """A model whose attention this engine would get wrong, or that it cannot load."""


class RequestTooLarge(BadArgument):
    """A request that exceeds the model's positions or the whole KV cache."""


class TooBusy(RoseinferError, RuntimeError):
    """A request beyond the present capacity; the same may work later."""


class NoDistribution(RoseinferError, RuntimeError):
    """Logits that allow no choice of a next token."""


def did_you_mean(name: str, known_names: Iterable[str], prefix: str = "") -> str:
    """Return a question that suggests the known name with the closest spelling, or ``""``."""
    from difflib import get_close_matches

    matches = get_close_matches(name, known_names, n=1)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""


def error_with_type(error: BaseException) -> str:
    """Return the message of an error after its type, since ``'x'`` alone explains nothing."""
    message = str(error).split("\nException raised from")[0]  # a C++ trace follows
    return f"{type(error).__name__}: {message}"


def short_repr(value: object) -> str:
    """Return the repr of a value for a message: at most 200 characters, without raising.

    Python refuses to write integers of more than 4,300 digits.
    """
    if isinstance(value, int) and value.bit_length() > _LONGEST_INT:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return f"{value!r:.200}"
    except Exception:  # of an element, for instance
        return f"a {type(value).__name__} that cannot be written"


_LONGEST_INT = 600
"""Bits of the largest integer written in digits."""


def to_argument_error(error: Exception, requirement: str, *values: object) -> RoseinferError:
    """Return the error to raise instead of one caused by unchecked arguments.

    A ``RoseinferError`` stays. Any other becomes ``BadArgument``: ``requirement``, not ``values``.
    """
    if isinstance(error, RoseinferError):
        return error
    actual = " and ".join(map(short_repr, values))
    return BadArgument(f"{requirement}, not {actual} ({error_with_type(error)})")


def _rebuild_error(
    kind: type[RoseinferError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> RoseinferError:
    """Return an unpickled error, without ``__init__``, which may take other arguments."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class _ErrorWithCause(RoseinferError, RuntimeError):
    """An error with an optional cause, safe to keep: the frames of the cause are cleared."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        if cause is not None:
            message += f": {type(cause).__name__}: {cause}"
            self.__cause__ = cause
            _clear_all_frames(cause)
        super().__init__(message)


class StepFailed(_ErrorWithCause):
    """A step of the engine that raised. Each of its requests gets this error."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("the step that this request took part in failed", cause)


class DetokenizationFailed(_ErrorWithCause):
    """Tokens that the tokenizer cannot turn into text."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("the tokenizer cannot turn these tokens into text", cause)


class EngineStopped(_ErrorWithCause):
    """A request to an engine that has stopped, or does not run in this process."""


class EngineRestarting(EngineStopped):
    """A request to an engine whose process has ended and is being restarted."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds until it may run again."""


class RanksFailed(_ErrorWithCause):
    """A failure of the processes that compute one model together: one of them ended or failed."""


def _clear_all_frames(error: BaseException) -> None:
    """Clear the frames of an exception and of its causes, which may hold large tensors."""
    chain: list[BaseException | None] = [error]
    for each in chain:  # the list grows meanwhile
        if each is not None:
            clear_frames(each.__traceback__)
            chain += {each.__cause__, each.__context__}.difference(chain)
