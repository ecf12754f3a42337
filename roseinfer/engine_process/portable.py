"""Errors that another process is to raise, and one where something does not go there."""

from __future__ import annotations

import pickle
import sys
import traceback

from roseinfer.errors import ConfigError, RoseinferError


def portable(error: BaseException) -> Exception:
    """Return what can be pickled and says the same.

    Where an error that nobody raised on purpose came from is said here, since that stays behind.
    Its message is left out then: a prompt may be in it.
    """
    if isinstance(error, RoseinferError):
        return error
    kind = type(error).__name__
    where = "".join(traceback.format_tb(error.__traceback__))
    print(f"the engine: {kind}\n{where}", file=sys.stderr, flush=True)
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever it is made of does not go
        pass
    return RuntimeError(f"{kind}: {error}")


def tokenizer_stays(error: Exception) -> ConfigError:
    """Return the error of a server whose engine cannot hand it the model's tokenizer."""
    return ConfigError(
        "the model's tokenizer cannot go from the engine's process to the server's "
        f"({type(error).__name__}: {error}): save it as one that transformers loads by itself, or "
        "serve the model from Python with AsyncLLM, which needs one process"
    )
