"""What hears of every torch operation, and can be deaf for a while."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


class Listening(TorchDispatchMode):
    """Hands every operation to ``_note_operation`` once it is done."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listening = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What is compiled runs by operations here, and torch would import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._listening:
            self._note_operation(func, args, kwargs, result)
        return result

    @abstractmethod
    def _note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None: ...

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Note nothing: what runs now is no work of the step."""
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before
