"""Caches that do not wait for their device where they must."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.capabilities.caches.queued_cache import QueuedCache

if TYPE_CHECKING:
    from functools import partial

    from pytest_roseinfer.capabilities.simulated_device import Event


class ReusesTheBufferEarly(QueuedCache):
    """It fills a staging buffer that the device has not copied yet."""

    def wait_for_buffer(self, at: int) -> None: ...


class RecordsTheCopyEarly(QueuedCache):
    """It takes a staging buffer for copied when the device comes to the copy."""

    def copy_slots(self, at: int) -> None:
        early = self.queue.record_event()
        super().copy_slots(at)
        self.copied[at] = early


class FreesUnderAWriter(QueuedCache):
    """S6: it writes a prompt to blocks that were freed while a token is on its way to them."""

    def begin_prompt(self) -> None: ...


class LetsInputsBeOverwritten(QueuedCache):
    """S6: it does not say that what it was handed is still to be read by another stream."""

    def end_prompt(self) -> None: ...


class ReadsBeforeItIsThere(QueuedCache):
    """It returns what it copies to the host without waiting for it."""

    def wait_for(self, arrived: Event) -> None: ...


class RecordsTheArrivalEarly(QueuedCache):
    """It waits for all that the device was asked for before the copy to the host."""

    def read_back(self, copy: partial[None]) -> Event:
        arrived = self.queue.record_event()
        self.queue.submit(copy)
        return arrived


BROKEN = (
    ReusesTheBufferEarly,
    RecordsTheCopyEarly,
    FreesUnderAWriter,
    LetsInputsBeOverwritten,
    ReadsBeforeItIsThere,
    RecordsTheArrivalEarly,
)
