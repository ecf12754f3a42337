"""A picture of docs/findings: an example on which an adapter fails, drawn by the harness."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import CacheSpec, History, RequestMix, RequestSpec
from pytest_roseinfer.engines.run import run_mix
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run.machine import run_history
from pytest_roseinfer.search.recorder import record
from tests.others.fetch import FOLDER, sources
from tests.others.found_scripts import PAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.capabilities.operation import Operation


@dataclass(frozen=True, slots=True)
class Picture:
    adapter: type[Adapter]
    example: History | RequestMix
    summary: str
    """First words of the failure's message."""
    project: str = ""
    """Name of the fetched project; "" for one that is installed."""
    imports: tuple[str, ...] = ()
    """Further fetched projects that the adapter imports; the last has priority."""
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Setting of the project under which it fails."""
    passing: tuple[type[Adapter], History | RequestMix] | None = None
    """Adapter and example that differ from these in one thing, and pass; None if a search found the
    failure."""

    def can_be_drawn(self) -> bool:
        return all((FOLDER / name).exists() for name in (self.project, *self.imports))

    @contextmanager
    def project_set_up(self) -> Iterator[None]:
        """Let the project be imported, under the setting."""
        for name in filter(None, (self.project, *self.imports)):
            if (folder := str(sources(name))) not in sys.path:
                sys.path.insert(0, folder)
        with self.setting():
            yield

    def draw(self) -> str:
        """Run the example, which must fail as documented, and return its drawing."""
        check = _check_of(self.example)
        with self.project_set_up(), TemporaryDirectory() as folder:
            try:
                check(self.adapter, self.example)
            except Difference as failure:
                if not failure.summary.startswith(self.summary):
                    raise
                record(self.adapter, self.example, check.__name__, failure, folder)
            (drawing,) = Path(folder).glob("*.svg")
            return drawing.read_text(encoding="utf-8")

    def run_passing(self) -> None:
        """Run the example that passes; raise ``Difference`` if it fails."""
        assert self.passing
        adapter, example = self.passing
        with self.project_set_up():
            _check_of(example)(adapter, example)


def _check_of(example: History | RequestMix) -> Callable[..., object]:
    return run_history if isinstance(example, History) else run_mix


def mix_of(adapter: type[Adapter], *requests: RequestSpec, size: int, **fields: Any) -> RequestMix:
    """Return a mix with a cache of ``size`` tokens, and the first of each option not given."""
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    own = {name: fields.pop(name) for name in options.keys() & fields.keys()}
    return RequestMix(requests, cache_tokens=size, options=options | own, **fields)


def one_text(*steps: Operation, block_size: int, **options: Any) -> History:
    """Return a history whose sequences all have one text of equal tokens, in two blocks."""
    spec = CacheSpec(block_size=block_size, num_blocks=2, num_heads=1, head_dim=1, options=options)
    return History(spec, steps, texts=((0, 0),))


def file_of(name: str) -> Path:
    return PAGES / f"{name}.svg"
