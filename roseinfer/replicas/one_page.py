"""The metrics of all replicas as one page, on which each is told by its label ``engine``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_OWN = "engine="
"""What every number of a replica's has for a label; those of its process have none."""


def one_page(pages: Iterable[bytes]) -> bytes:
    """Return pages in Prometheus' format as one: what a name means is said once, before all."""
    meant: dict[str, list[str]] = {}
    numbers: dict[str, list[str]] = {}
    for page in pages:
        name = ""
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                meant[name], numbers[name] = [line], numbers.get(name, [])
            elif line.startswith("# "):
                meant[name].append(line)
            elif _OWN in line:
                numbers[name].append(line)
    lines = (line for name in meant if numbers[name] for line in (*meant[name], *numbers[name]))
    return "".join(f"{line}\n" for line in lines).encode()
