"""Caches that do not wait for their device where they must."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.capabilities.caches.queued_cache import QueuedCache

if TYPE_CHECKING:
    from functools import partial

    from pytest_roseinfer.capabilities.simulated_device import Event


class ReusesTheBufferEarly(QueuedCache):
    """Fills a staging buffer that the device has not copied yet."""

    def wait_for_buffer(self, at: int) -> None: ...


class RecordsTheCopyEarly(QueuedCache):
    """Takes a staging buffer for copied when the device reaches the copy."""

    def copy_slots(self, at: int) -> None:
        early = self.queue.record_event()
        super().copy_slots(at)
        self.copied[at] = early


class FreesUnderAWriter(QueuedCache):
    """S6: writes a prompt to freed blocks while a queued token write to them is pending."""

    def begin_prompt(self) -> None: ...


class LetsInputsBeOverwritten(QueuedCache):
    """S6: does not mark its inputs as still read by another stream."""

    def end_prompt(self) -> None: ...


class ReadsBeforeTheCopy(QueuedCache):
    """Returns host memory without waiting for the copy to it."""

    def wait_for(self, arrived: Event) -> None: ...


class RecordsTheArrivalEarly(QueuedCache):
    """Waits for all calls queued before the copy to the host."""

    def read_back(self, copy: partial[None]) -> Event:
        arrived = self.queue.record_event()
        self.queue.submit(copy)
        return arrived


BROKEN = (
    ReusesTheBufferEarly,
    RecordsTheCopyEarly,
    FreesUnderAWriter,
    LetsInputsBeOverwritten,
    ReadsBeforeTheCopy,
    RecordsTheArrivalEarly,
)
