"""The exceptions roseinfer raises. An operation that raised one has changed nothing."""

from __future__ import annotations

from traceback import clear_frames
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class RoseinferError(Exception):
    """Root of every error raised on purpose by this package.

    One can be pickled, to be raised in another process. What caused it stays behind: where that is
    of account, the words have it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_was, (type(self), self.args, self.__dict__)


class OutOfBlocks(RoseinferError, RuntimeError):
    """The pool cannot supply the blocks an operation needs."""

    def __init__(self, *, needed: int, free: int, where: str) -> None:
        super().__init__(
            f"{where} has {free} free blocks and {needed} are needed: "
            "free some sequences, or build the cache with a larger max_blocks_per_layer"
        )
        self.needed = needed
        self.free = free


class BadBlock(RoseinferError, ValueError):
    """A block id that is unknown, free, or of another layer."""


class BadRefcount(RoseinferError, ValueError):
    """A block released more often than it is held, or appended to by more lists than hold it."""


class BadArgument(RoseinferError, ValueError):
    """A shape, length, device, dtype, layer or list the operation cannot work with."""


class StalePlan(RoseinferError, RuntimeError):
    """An append plan is used after its index buffers were given to later plans."""


class ConfigError(RoseinferError, ValueError):
    """A setting, from code or from the environment, that makes no sense."""


class TritonUnavailable(UserWarning):
    """Triton was wanted and cannot run here; the torch paths write instead."""


class UnsupportedModel(RoseinferError, ValueError):
    """A model whose attention this engine would get wrong, or that it cannot load."""


class RequestTooLarge(BadArgument):
    """A request that the model's positions or the KV cache could never hold."""


class TooBusy(RoseinferError, RuntimeError):
    """More is asked for at once than can be done; the same may work later."""


class NoDistribution(RoseinferError, RuntimeError):
    """Logits from which no next token can be chosen."""


def did_you_mean(said: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question that names what is spelled most alike, or nothing."""
    from difflib import get_close_matches

    alike = get_close_matches(said, known, n=1)
    return f"; did you mean {prefix}{alike[0]}?" if alike else ""


def with_kind(error: BaseException) -> str:
    """Return what an error of a library says, with its kind: alone, ``'x'`` says nothing."""
    said = str(error).split("\nException raised from")[0]  # a trace of C++ follows
    return f"{type(error).__name__}: {said}"


def short_repr(value: object) -> str:
    """Return the repr of a value that a message shows: at most 200 characters, and never an error.

    Python refuses to write integers of more than 4,300 digits.
    """
    if isinstance(value, int) and value.bit_length() > _LONGEST_INT:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return f"{value!r:.200}"
    except Exception:  # of what is in it
        return f"a {type(value).__name__} that cannot be written"


_LONGEST_INT = 600
"""Bits of the largest integer that is written in digits."""


def wrong_kind(error: Exception, wanted: str, *given: object) -> RoseinferError:
    """Return the error to raise for one that came of arguments, which a call did not check first.

    One of ours stays. Any other says that something is not what is ``wanted``.
    """
    if isinstance(error, RoseinferError):
        return error
    named = " and ".join(map(short_repr, given))
    return BadArgument(f"{wanted}, not {named} ({with_kind(error)})")


def _as_it_was(
    kind: type[RoseinferError], said: tuple[Any, ...], known: dict[str, Any]
) -> RoseinferError:
    """Return an error that was raised elsewhere. Its kind makes new ones, of other arguments."""
    error = kind.__new__(kind, *said)
    error.__dict__.update(known)
    return error


class _Caused(RoseinferError, RuntimeError):
    """An error that may be kept for long, with the exception that caused it, if one did."""

    def __init__(self, what: str, cause: BaseException | None = None) -> None:
        if cause is not None:
            what += f": {type(cause).__name__}: {cause}"
            self.__cause__ = cause
            _clear_all_frames(cause)
        super().__init__(what)


class StepFailed(_Caused):
    """A step of the engine broke off. Every request that took part in it gets this error."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("the step that this request took part in failed", cause)


class NoText(_Caused):
    """Tokens that the tokenizer cannot turn into text."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("the tokenizer cannot turn these tokens into text", cause)


class EngineStopped(_Caused):
    """Tokens are asked of an engine that does not run: any more, or in this process."""


class EngineRestarting(EngineStopped):
    """Tokens are asked of an engine whose process has ended, and is started again."""

    def __init__(self, what: str, *, retry_after: int) -> None:
        super().__init__(what)
        self.retry_after = retry_after
        """Seconds after which it may run again."""


class RanksFailed(_Caused):
    """The processes that compute one model together cannot go on: one of them has ended."""


def _clear_all_frames(error: BaseException) -> None:
    """Clear the frames of an exception and of those behind it, which may hold large tensors."""
    chain: list[BaseException | None] = [error]
    for each in chain:  # the list grows meanwhile
        if each is not None:
            clear_frames(each.__traceback__)
            chain += {each.__cause__, each.__context__}.difference(chain)
