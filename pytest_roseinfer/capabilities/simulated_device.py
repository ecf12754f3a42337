"""The simulated device, which does torch operations later, for code that calls torch by itself.

Memory is the device's where the cache said so (``DeviceQueue.on_device``), and where an operation
on the device's put its result; a result that is not there yet is poison. What CUDA and torch
promise of a copy between host and device, and what is done here:

- To the device, blocking: the host waits for the device, and the source has been read.
- To the device, ``non_blocking``, from pinned memory: nothing is waited for, and the source is
  read when the device gets there. From other memory it is read before the call returns: the
  driver copies it to a buffer of its own.
- To the host, blocking, and ``item``, ``tolist``, ``cpu`` and ``numpy``: the host waits.
- To the host, ``non_blocking``: what was there is there until the device gets to the copy. For
  memory that is not pinned CUDA says it may wait, which nobody may rely on.

A tensor of the host's that is an argument of any other operation stands for one that was copied
to the device: it is read at once, and nobody waits. The host waits where an operation's result
has no shape before it is computed, as with ``nonzero``.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pytest_roseinfer.capabilities.operation import Device, Operation
from pytest_roseinfer.capabilities.payload import Poison, poison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


class Event:
    """A mark behind what a stream was asked for so far; methods are named as torch's."""

    def __init__(self) -> None:
        self._reached: Callable[[], bool] | None = None
        self._reach: Callable[[], None] | None = None

    def record(self, stream: Stream) -> None:
        """Move the mark behind all that ``stream`` was asked for by now."""
        asked = stream.asked
        self._reached = lambda: stream.done >= asked
        self._reach = partial(stream.run_to, asked)

    def query(self) -> bool:
        """Return True if the device is there, as for an event that was never recorded."""
        return self._reached is None or self._reached()

    def synchronize(self) -> None:
        """Wait until the device is there."""
        if self._reach:
            self._reach()

    @property
    def wait_on_device(self) -> Callable[[], None]:
        """What another stream does to wait, for the mark as it stands now."""
        return self._reach or (lambda: None)


class Stream:
    """Calls that run in the order in which they were submitted; methods are named as torch's."""

    def __init__(self) -> None:
        self.asked = 0
        """How many calls were submitted."""
        self.done = 0
        """How many of them have run, or begun to."""
        self._calls: deque[Callable[[], object]] = deque()
        self.running = False

    def submit(self, call: Callable[[], object]) -> None:
        """Have the device make this call when it gets there."""
        self._calls.append(call)
        self.asked += 1

    def record_event(self) -> Event:
        """Return a mark behind what was submitted so far."""
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is submitted next run only when ``event`` is reached; the host does not wait."""
        self.submit(event.wait_on_device)

    def synchronize(self) -> None:
        """Wait until all has run."""
        self.run_to(self.asked)

    def query(self) -> bool:
        """Return True if all has run."""
        return not self._calls

    def run_to(self, asked: int) -> None:
        """Run the first ``asked`` of all calls that were ever submitted, as far as they have not.

        A call that waits for another stream has that one run as far as it must.
        """
        was_running, self.running = self.running, True
        try:
            while self.done < asked:
                self.done += 1
                self._calls.popleft()()
        finally:
            self.running = was_running


class DeviceQueue(Stream):
    """The stream that a cache is given, and what belongs to the same device.

    A cache submits calls, or has torch do it: while the cache is driven, operations on tensors
    that it names with ``on_device`` are held back (``QueuedTorch`` says how).
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = [self]
        self.current: Stream = self
        """The stream that torch's operations go to."""
        self._on_device: dict[int, object] = {}
        self._pinned: dict[int, object] = {}

    def new_stream(self) -> Stream:
        """Make a stream that runs beside this one, in no order but that which events give."""
        stream = Stream()
        self.streams.append(stream)
        return stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Have torch's operations go to another stream, as in ``torch.cuda.stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def on_device(self, *tensors: torch.Tensor) -> None:
        """Take the memory of these tensors for the device's."""
        self._on_device.update(map(_memory, tensors))

    def pinned(self, *tensors: torch.Tensor) -> None:
        """Take the memory of these tensors for pinned, so that copies from it may read it late."""
        self._pinned.update(map(_memory, tensors))

    @property
    def has_memory(self) -> bool:
        """True once a tensor was named that is the device's."""
        return bool(self._on_device)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor)[0] in self._on_device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor)[0] in self._pinned

    @property
    def busy(self) -> bool:
        """True while a call runs."""
        return any(stream.running for stream in self.streams)

    @property
    def in_flight(self) -> int:
        """How many calls of all streams have not run."""
        return sum(stream.asked - stream.done for stream in self.streams)

    def run(self, count: int, stream: int = 0) -> None:
        """Run the next ``count`` calls of a stream, or all that there are."""
        chosen = self.streams[stream % len(self.streams)]
        chosen.run_to(min(chosen.asked, chosen.done + count))

    def finish(self) -> None:
        """Wait until every stream has run all; which comes first, nobody may rely on."""
        first = self.asked % len(self.streams)
        for stream in [*self.streams[first:], *self.streams[:first]]:
            stream.synchronize()


def _memory(tensor: torch.Tensor) -> tuple[int, object]:
    """Return a number for the memory of a tensor, and what keeps others from getting it."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


_COPY = torch.ops.aten.copy_.default
_Tensor = torch.Tensor
_READ_BY_THE_HOST = {_Tensor.tolist, _Tensor.numpy, _Tensor.cpu}


class QueuedTorch(ExitStack):
    """In this context, torch operations on the device's tensors are submitted to a queue."""

    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__()
        self._queue = queue

    def __enter__(self) -> QueuedTorch:
        self.enter_context(_Operations(self._queue))
        self.enter_context(_HostReads(self._queue))
        return self


class _HostReads(TorchFunctionMode):
    """Waits for the device where the host reads a tensor by no operation."""

    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _READ_BY_THE_HOST and self._queue.is_on_device(args[0]):
            read: list[Any] = []
            self._queue.current.submit(lambda: read.append(args[0].clone()))
            self._queue.current.synchronize()
            args = read
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an operation."""

    operation: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, _Tensor)]

    def written(self) -> list[torch.Tensor]:
        """List the tensors that it writes to."""
        arguments = self.operation._schema.arguments
        given = dict(zip((each.name for each in arguments), self.args, strict=False))
        given.update(self.kwargs)
        writes = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
        return [
            tensor
            for name in writes
            for tensor in tree_leaves(given.get(name))
            if isinstance(tensor, _Tensor)
        ]

    def with_tensors(self, changed: Callable[[torch.Tensor], torch.Tensor]) -> _Call:
        args, kwargs = tree_map_only(_Tensor, changed, (self.args, dict(self.kwargs)))
        return _Call(self.operation, args, kwargs)

    @property
    def non_blocking(self) -> bool:
        return bool(self.args[2] if len(self.args) > 2 else self.kwargs.get("non_blocking"))

    def __call__(self) -> Any:
        return self.operation(*self.args, **self.kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Submits operations; what they return is there when they have run."""

    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queue = queue

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch would import its compiler to leave this out."""
        return False

    def __torch_dispatch__(
        self,
        operation: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = _Call(operation, args, kwargs or {})
        if self._queue.busy or not any(map(self._queue.is_on_device, call.tensors())):
            return call()
        # Made of others, as inference mode leaves it, it returns a view or not, as it turns out.
        with self:
            result = operation.decompose(*call.args, **call.kwargs)
        if result is not NotImplemented:
            return result
        returns = operation._schema.returns
        if operation is _COPY:
            return self._copy(call)
        if any(each.alias_info and not each.alias_info.is_write for each in returns):
            return call()  # a view shows the same memory
        if operation._schema.is_mutable:
            return self._write(call)
        return self._compute(call)

    def _copy(self, call: _Call) -> Any:
        """Copy between host and device, or from one place of the device to another."""
        target, source = call.args[0], call.args[1]
        to_device, from_device = map(self._queue.is_on_device, (target, source))
        if not (to_device and from_device):
            if not call.non_blocking:
                self._queue.current.synchronize()
                return call()
            if to_device and not self._queue.is_pinned(source):
                call = _Call(call.operation, (target, source.clone()), {})
        self._submit(call)
        return target

    def _write(self, call: _Call) -> Any:
        written, returns = call.written(), call.operation._schema.returns
        if len(returns) not in (0, len(written)):
            return self._wait_for(call)
        self._queue.on_device(*written)
        self._submit(self._as_it_is_now(call))
        return written[0] if len(returns) == 1 else tuple(written) if returns else None

    def _compute(self, call: _Call) -> Any:
        try:
            shapes = _on_meta(call)()
        except (NotImplementedError, RuntimeError):
            return self._wait_for(call)
        if not all(isinstance(each, _Tensor) for each in tree_leaves(shapes)):
            return self._wait_for(call)
        device = next(filter(self._queue.is_on_device, call.tensors())).device
        promised = tree_map_only(_Tensor, lambda shape: _poison(shape, device), shapes)
        self._queue.on_device(*tree_leaves(promised))
        now = self._as_it_is_now(call)

        def keep_promise() -> None:
            for promise, result in zip(tree_leaves(promised), tree_leaves(now()), strict=True):
                promise.copy_(result)

        self._submit(keep_promise)
        return promised

    def _wait_for(self, call: _Call) -> Any:
        """Run it at once, behind all that was asked for so far."""
        self._queue.current.synchronize()
        result = call()
        self._queue.on_device(*(each for each in tree_leaves(result) if isinstance(each, _Tensor)))
        return result

    def _as_it_is_now(self, call: _Call) -> _Call:
        """Copy the arguments that are the host's, which may change them."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if self._queue.is_on_device(tensor) else tensor.clone()

        return call.with_tensors(kept)

    def _submit(self, call: Callable[[], object]) -> None:
        def run() -> None:
            # Results may have been promised in inference mode or outside it.
            with torch.inference_mode():
                call()

        self._queue.current.submit(run)


def _on_meta(call: _Call) -> _Call:
    """Return the same call on tensors without memory, which computes nothing but shapes."""
    call = call.with_tensors(
        lambda tensor: torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
    )
    kwargs = {name: value for name, value in call.kwargs.items() if name != "pin_memory"}
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return _Call(call.operation, call.args, kwargs)


def _poison(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory that holds what nobody may read yet: NaN, or numbers that index nothing."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if like.dtype.is_complex:
        return made.fill_(float("nan"))
    if like.dtype.is_floating_point:
        poison(made, Poison.NOT_YET)
        return made
    return made.fill_(True if like.dtype is torch.bool else torch.iinfo(like.dtype).max)


# The device of a cache that takes a queue.


class QueuedDevice(Device):
    """It makes the calls that it is asked for when it is waited for, or told to."""

    def __init__(self, adapter: Any, read: Operation) -> None:
        """Take the step that a history ends with while the device has something to do."""
        self._read = read
        self._queue = DeviceQueue()
        adapter.use_queue(self._queue)

    @property
    def idle(self) -> bool:
        return not self._queue.in_flight

    def last_steps(self) -> Sequence[Operation]:
        return () if self.idle else (self._read,)

    def run(self, count: int, stream: int) -> None:
        self._queue.run(count, stream)

    def finish(self) -> None:
        self._queue.finish()

    def working(self) -> AbstractContextManager[object]:
        return QueuedTorch(self._queue) if self._queue.has_memory else nullcontext()

    def hand_over(self, *tensors: torch.Tensor) -> None:
        if self._queue.has_memory:
            self._queue.on_device(*tensors)

    def overwrite(self, tensor: torch.Tensor) -> None:
        if self.idle:  # so that a cache that asks for nothing has nothing in flight
            super().overwrite(tensor)
        else:
            self._queue.submit(partial(super().overwrite, tensor))
