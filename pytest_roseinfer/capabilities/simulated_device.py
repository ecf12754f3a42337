"""A simulated device that runs torch operations asynchronously, for code that calls torch itself.

Device memory is memory that the cache registers with ``DeviceQueue.on_device``, and the results of
operations on it; a result that is not computed yet is poison. The semantics of copies between host
and device follow CUDA and torch:

- To the device, blocking: the host waits for the device, and the source has been read.
- To the device, ``non_blocking``, from pinned memory: the host does not wait, and the source is
  read when the device reaches the copy. Other memory is read before the call returns: the driver
  copies it to a staging buffer.
- To the host, blocking, and ``item``, ``tolist``, ``cpu`` and ``numpy``: the host waits.
- To the host, ``non_blocking``: the target keeps its old contents until the device reaches the
  copy. For memory that is not pinned CUDA may wait, but code must not rely on it.

A host tensor that is an argument of any other operation stands for one that was copied to the
device: it is read at once, and the host does not wait. The host waits for an operation whose result
has no known shape before it is computed, such as ``nonzero``.
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
    """A position in a stream, after all calls submitted so far; methods are named as in torch."""

    def __init__(self) -> None:
        self._reached: Callable[[], bool] | None = None
        self._reach: Callable[[], None] | None = None

    def record(self, stream: Stream) -> None:
        """Move the event after all calls that were submitted to ``stream`` so far."""
        position = stream.num_submitted
        self._reached = lambda: stream.num_started >= position
        self._reach = partial(stream.run_to, position)

    def query(self) -> bool:
        """Return True if the device has reached the event, or it was never recorded."""
        return self._reached is None or self._reached()

    def synchronize(self) -> None:
        """Wait until the device reaches the event."""
        if self._reach:
            self._reach()

    @property
    def wait_on_device(self) -> Callable[[], None]:
        """Call that makes another stream wait for the event's present position."""
        return self._reach or (lambda: None)


class Stream:
    """Calls that run in the order of submission; methods are named as in torch."""

    def __init__(self) -> None:
        self.num_submitted = 0
        """Number of calls submitted so far."""
        self.num_started = 0
        """Number of calls that have run or begun to."""
        self._calls: deque[Callable[[], object]] = deque()
        self.running = False

    def submit(self, call: Callable[[], object]) -> None:
        """Append a call to the stream."""
        self._calls.append(call)
        self.num_submitted += 1

    def record_event(self) -> Event:
        """Return an event after all calls submitted so far."""
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Delay later calls of this stream until ``event`` is reached; the host does not wait."""
        self.submit(event.wait_on_device)

    def synchronize(self) -> None:
        """Wait until all calls have run."""
        self.run_to(self.num_submitted)

    def query(self) -> bool:
        """Return True if all calls have run."""
        return not self._calls

    def run_to(self, position: int) -> None:
        """Run the calls up to a position, counted from the first call ever submitted.

        A call that waits for another stream runs that one as far as necessary.
        """
        was_running, self.running = self.running, True
        try:
            while self.num_started < position:
                self.num_started += 1
                self._calls.popleft()()
        finally:
            self.running = was_running


class DeviceQueue(Stream):
    """The default stream of a simulated device, with its other streams and its memory.

    A cache submits calls, or torch does: while the cache is driven, operations on tensors that it
    registers with ``on_device`` are deferred by ``QueuedTorch``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = [self]
        self.current: Stream = self
        """Stream that gets torch's operations."""
        self._on_device: dict[int, object] = {}
        self._pinned: dict[int, object] = {}

    def new_stream(self) -> Stream:
        """Make a stream that runs concurrently with this one, ordered only by events."""
        stream = Stream()
        self.streams.append(stream)
        return stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Submit torch's operations to another stream, as ``torch.cuda.stream`` does."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def on_device(self, *tensors: torch.Tensor) -> None:
        """Register the memory of these tensors as the device's."""
        self._on_device.update(map(_memory, tensors))

    def pinned(self, *tensors: torch.Tensor) -> None:
        """Register the memory of these tensors as pinned: copies from it may read it late."""
        self._pinned.update(map(_memory, tensors))

    @property
    def has_memory(self) -> bool:
        """True once a tensor was registered as the device's."""
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
        """Number of calls in all streams that have not run."""
        return sum(stream.num_submitted - stream.num_started for stream in self.streams)

    def run(self, count: int, stream: int = 0) -> None:
        """Run the next ``count`` calls of a stream, or all if it has fewer."""
        chosen = self.streams[stream % len(self.streams)]
        chosen.run_to(min(chosen.num_submitted, chosen.num_started + count))

    def finish(self) -> None:
        """Wait until every stream has run all calls, starting with a varying stream."""
        first = self.num_submitted % len(self.streams)
        for stream in [*self.streams[first:], *self.streams[:first]]:
            stream.synchronize()


def _memory(tensor: torch.Tensor) -> tuple[int, object]:
    """Return a key for the memory of a tensor, and the storage that keeps the key unique."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


_COPY = torch.ops.aten.copy_.default
_Tensor = torch.Tensor
_READ_BY_THE_HOST = {_Tensor.tolist, _Tensor.numpy, _Tensor.cpu}


class QueuedTorch(ExitStack):
    """A context that submits torch operations on the device's tensors to a queue."""

    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__()
        self._queue = queue

    def __enter__(self) -> QueuedTorch:
        self.enter_context(_Operations(self._queue))
        self.enter_context(_HostReads(self._queue))
        return self


class _HostReads(TorchFunctionMode):
    """A mode that waits for the device if the host reads a tensor without a torch operation."""

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
        bound = dict(zip((each.name for each in arguments), self.args, strict=False))
        bound.update(self.kwargs)
        writes = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
        return [
            tensor
            for name in writes
            for tensor in tree_leaves(bound.get(name))
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
    """A mode that submits operations; their results are poison until they have run."""

    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queue = queue

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler for True, and nothing is compiled here."""
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
        # In inference mode, composite operations arrive here; only their parts show if a result is
        # a view.
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
        """Copy between host and device, or within the device."""
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
            return self._run_synchronously(call)
        self._queue.on_device(*written)
        self._submit(self._copy_host_arguments(call))
        return written[0] if len(returns) == 1 else tuple(written) if returns else None

    def _compute(self, call: _Call) -> Any:
        try:
            shapes = _on_meta(call)()
        except (NotImplementedError, RuntimeError):
            return self._run_synchronously(call)
        if not all(isinstance(each, _Tensor) for each in tree_leaves(shapes)):
            return self._run_synchronously(call)
        device = next(filter(self._queue.is_on_device, call.tensors())).device
        outputs = tree_map_only(_Tensor, lambda shape: _poison(shape, device), shapes)
        self._queue.on_device(*tree_leaves(outputs))
        deferred = self._copy_host_arguments(call)

        def compute_outputs() -> None:
            for output, result in zip(tree_leaves(outputs), tree_leaves(deferred()), strict=True):
                output.copy_(result)

        self._submit(compute_outputs)
        return outputs

    def _run_synchronously(self, call: _Call) -> Any:
        """Wait for all earlier calls of the stream, and run this one."""
        self._queue.current.synchronize()
        result = call()
        self._queue.on_device(*(each for each in tree_leaves(result) if isinstance(each, _Tensor)))
        return result

    def _copy_host_arguments(self, call: _Call) -> _Call:
        """Copy the arguments in host memory, which the host may change before the call runs."""

        def copy_if_host(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if self._queue.is_on_device(tensor) else tensor.clone()

        return call.with_tensors(copy_if_host)

    def _submit(self, call: Callable[[], object]) -> None:
        def run() -> None:
            # Only inference mode may write to both inference tensors and others.
            with torch.inference_mode():
                call()

        self._queue.current.submit(run)


def _on_meta(call: _Call) -> _Call:
    """Return the same call on meta tensors, which computes only shapes."""
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
    """Return memory whose values must not be read yet: NaN, or integers that are no valid index."""
    poisoned = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if like.dtype.is_complex:
        return poisoned.fill_(float("nan"))
    if like.dtype.is_floating_point:
        poison(poisoned, Poison.NOT_COMPUTED)
        return poisoned
    return poisoned.fill_(True if like.dtype is torch.bool else torch.iinfo(like.dtype).max)


# The device of a cache that defines ``use_queue``


class QueuedDevice(Device):
    """A device that makes submitted calls only when it is waited for or advanced by a step."""

    def __init__(self, adapter: Any, read: Operation) -> None:
        """Pass a queue to an adapter; ``read`` ends histories that have calls in flight."""
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

    def torch_context(self) -> AbstractContextManager[object]:
        return QueuedTorch(self._queue) if self._queue.has_memory else nullcontext()

    def hand_over(self, *tensors: torch.Tensor) -> None:
        if self._queue.has_memory:
            self._queue.on_device(*tensors)

    def overwrite(self, tensor: torch.Tensor) -> None:
        if self.idle:  # a cache that submits no calls must have none in flight
            super().overwrite(tensor)
        else:
            self._queue.submit(partial(super().overwrite, tensor))
