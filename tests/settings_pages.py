"""Lists of settings on pages of docs/reference, generated from their declarations.

``python -m tests.settings_pages`` rewrites them.
"""

from __future__ import annotations

from dataclasses import fields

from pytest_roseinfer.plugin.reference import entry, put_section
from roseinfer import EngineConfig, SamplingParams
from roseinfer.cli.model_options import option_names
from roseinfer.config import ServerConfig
from tests.python_process import ROOT

PAGES: dict[str, dict[str, type]] = {
    "docs/reference/engine.md": {
        "sampling parameters": SamplingParams,
        "engine settings": EngineConfig,
    },
    "docs/reference/server.md": {"server settings": ServerConfig},
}


def listed(settings: type) -> str:
    """Return a list of all fields with meaning, option and default."""
    lines = []
    for each in fields(settings):
        declared = each.metadata
        text = str(declared.get("text", "ways in which the KV cache is written"))
        unset = declared.get("unset", "what the environment says")
        if declared:
            options = " or ".join(f"`{name}`" for name in option_names(each))
        else:
            options = "no option"
        if unset:
            text += f"; `{each.default!r}`: {unset}"
        bounds = [f"{word} {declared[key]}" for key, word in _BOUNDS.items() if key in declared]
        note = ", ".join([options, f"default `{each.default!r}`", *bounds])
        lines.append(entry(f"`{each.name}`", f"{text}.", note))
    return "\n".join(lines) + "\n"


_BOUNDS = {"minimum": "at least", "maximum": "at most"}


def main() -> None:
    for page, sections in PAGES.items():
        for name, settings in sections.items():
            put_section(ROOT / page, name, listed(settings))


if __name__ == "__main__":
    main()
