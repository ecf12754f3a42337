"""Write the tokens of the oldest reservation that is still open."""

from __future__ import annotations

from pytest_roseinfer.adapters.answers.checked import reservation
from pytest_roseinfer.cases.operations import operation


@operation.register
class Fill(operation.Operation):
    needs = frozenset({"reserve", "fill"})

    def words(self) -> str:
        return "write the tokens that room was reserved for first"

    def possible(self, oracle: operation.Oracle) -> bool:
        return bool(oracle.reserved)

    def written(self, oracle: operation.Oracle) -> operation.Written:
        return oracle.reserved[0]

    def change(self, oracle: operation.Oracle) -> None:
        due = oracle.reserved.pop(0)
        oracle.slide_written(due.rows)

    def drive(self, cache: operation.Driven) -> None:
        handle, cache.planned_with = cache.reserved.pop(0)
        try:
            cache.adapter.fill(handle, cache.key, cache.value)
        except Exception as error:
            if wrong := reservation(handle, error):
                raise wrong from error
            raise

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.oracle.reserved:
            yield operation.Move(4, 2, cls)
