"""Generated lists of the documentation, and the command that writes them.

``python -m pytest_roseinfer.plugin.reference docs/reference/options.md`` rewrites the lists of a
page in place; without a page it prints them. ``--adapter package.module:Class`` names an adapter
class of a cache or an engine, to list the additions of its own capabilities too.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from dataclasses import MISSING, fields
from inspect import get_annotations
from itertools import chain
from pathlib import Path
from textwrap import dedent, fill
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.engine import EngineAdapter, RequestMix, RequestSpec
from pytest_roseinfer.adapters.load_target import TargetError, load_target
from pytest_roseinfer.capabilities.capability import Traits, counted_conditions
from pytest_roseinfer.engine_capabilities.capability import (
    SamplingCore,
    for_adapter,
    mix_conditions,
)
from pytest_roseinfer.plugin import options

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_roseinfer.adapters.base import Adapter

COMMAND = (
    "python -m pytest_roseinfer.plugin.reference"
    " docs/reference/options.md docs/reference/harness.md docs/explanation/architecture.md"
)
"""Command that writes the lists of this project's pages."""
_WIDTH = 100
_UNBROKEN = "\0"
"""Placeholder for a space within code, where lines must not be broken."""


# Pages with generated sections.


class PageError(ValueError):
    """File without generated sections, or unreadable."""


def put_section(file: Path, name: str, body: str) -> None:
    """Replace a section of the page; raise ``PageError`` if the page does not have it."""
    section = _find(file, name)
    text = section.string
    file.write_text(text[: section.start()] + body + text[section.end() :], encoding="utf-8")


def read_section(file: Path, name: str) -> str:
    """Return a section of the page; raise ``PageError`` if the page does not have it."""
    return _find(file, name)[0]


def has_section(file: Path, name: str) -> bool:
    """Return True if the page has a section of this name."""
    return bool(_section(name).search(_read(file)))


def _find(file: Path, name: str) -> re.Match[str]:
    section = _section(name).search(_read(file))
    if not section:
        raise PageError(f"{file}: no section {name}; add its markers, or name a page that has them")
    return section


def _section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PageError(f"{file} cannot be read: {error}") from None


# Lists of an adapter class.


def shipped_sections() -> dict[str, str]:
    """Return the lists of this project's pages as Markdown, by section name."""
    both = sections(KVCacheAdapter) | sections(EngineAdapter)
    return {"options": _join_entries(_options()), **both}


def sections(adapter: type[Adapter]) -> dict[str, str]:
    """Return the lists of an adapter class as Markdown, by section name."""
    engine = issubclass(adapter, EngineAdapter)
    modules = [sys.modules[each.methods.__module__] for each in adapter.capabilities]
    lists = {
        "capabilities": (
            entry(f"`{each.__name__.rpartition('.')[2]}`", _first_line(each)) for each in modules
        ),
        "methods": _methods(adapter),
        "attributes": _attributes(adapter),
        **(_lists_of_engine(adapter) if engine else _lists_of_cache(adapter)),
    }
    kind = "engine " if engine else ""
    return {f"{kind}{name}": _join_entries(entries) for name, entries in lists.items()}


def _join_entries(entries: Iterable[str]) -> str:
    return "\n".join(entries) + "\n"


def _lists_of_cache(adapter: type[Any]) -> dict[str, Iterable[str]]:
    operations = chain.from_iterable(each.operations for each in adapter.capabilities)
    invariants = chain.from_iterable(each.invariants for each in adapter.capabilities)
    return {
        "operations": (
            entry(f"`{each.trace_name}`", _first_line(each), _needs(each.needs))
            for each in operations
        ),
        "conditions": (
            entry(f"`{name}`", description)
            for name, description in counted_conditions(adapter).items()
        ),
        "invariants": (
            entry(f"`{each.name}`", _first_line(each.check), _needs(each.needs))
            for each in invariants
        ),
    }


def _lists_of_engine(adapter: type[Any]) -> dict[str, Iterable[str]]:
    spec = for_adapter(adapter, RequestSpec((0,)))
    return {
        "conditions": (
            entry(f"`{name}`", description) for name, description in mix_conditions(adapter).items()
        ),
        "mixes": _fields(RequestMix),
        "requests": _fields(type(spec)),
        "parameters": _fields(type(spec.sampling)),
    }


def _fields(kind: type[Any]) -> Iterator[str]:
    """List the fields of a dataclass and its bases, each once."""
    docs: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        docs |= attribute_docs(each) if get_annotations(each) else {}
    for item in fields(kind):
        default = "" if item.default is MISSING else f"default `{_literal(item.default)}`"
        yield entry(f"`{item.name}`", docs.get(item.name, ""), default)


def _options() -> Iterator[str]:
    for option in options.entries():
        ini = f"ini `{option.ini}`" if option.ini else ""
        yield entry(f"`{option.usage}`", re.sub(r"(--[a-z-]+)", r"`\1`", option.description), ini)


def _methods(adapter: type[Adapter]) -> Iterator[str]:
    needs = dict(chain.from_iterable(each.needs.items() for each in adapter.capabilities))
    for declaring in adapter.declaring():
        for name, declared in vars(declaring).items():
            method = getattr(declared, "__func__", declared)
            if not inspect.isfunction(method) or name.startswith("_"):
                continue
            note = _needs({*needs.get(name, ())} - {name})
            if method is not declared:
                note = "class method"
            elif name in adapter.required:
                note = "required"
            parameters = ", ".join([*inspect.signature(method).parameters][1:])
            yield entry(f"`{name}({parameters})`", inspect.getdoc(method) or "", note)


def _attributes(adapter: type[Adapter]) -> Iterator[str]:
    for declaring in adapter.declaring():
        docs = attribute_docs(declaring)
        for name in (each for each in get_annotations(declaring) if not each.startswith("_")):
            default = getattr(declaring, name)
            yield entry(f"`{name}`", docs.get(name, ""), f"default `{_literal(default)}`")
            if isinstance(default, Traits):
                yield from _choices(default)


def _choices(traits: Traits) -> Iterator[str]:
    """List the fields of traits, with the choices of each ``Literal``."""
    docs = attribute_docs(type(traits))
    for name, hint in get_type_hints(type(traits)).items():
        default = getattr(traits, name)
        others = get_args(hint) if get_origin(hint) is Literal else ()
        choices = " or ".join(f"`{_literal(each)}`" for each in others if each != default)
        note = f"default `{_literal(default)}`" + (f"; else {choices}" if choices else "")
        yield entry(f"`{name}`", docs.get(name, ""), note, indent="  ")


def attribute_docs(declaring: type) -> Mapping[str, str]:
    """Return the docstrings of a class's annotated attributes, by name."""
    (tree,) = ast.parse(dedent(inspect.getsource(declaring))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(ast.Constant(str(doc))):
                    docs[statement.target.id] = doc
    return docs


def _first_line(documented: Any) -> str:
    """Return the first paragraph of a docstring; empty for one that a dataclass generates."""
    doc = inspect.getdoc(documented) or ""
    generated = doc.startswith(f"{documented.__name__}(")
    return "" if generated else doc.partition("\n\n")[0]


def _needs(names: Iterable[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in sorted(names))
    return f"needs {listed}" if listed else ""


def _literal(value: Any) -> str:
    """Return a default value as source code."""
    if isinstance(value, Traits | SamplingCore):
        return f"{type(value).__name__}()"
    if isinstance(value, tuple) and all(isinstance(each, type) for each in value) and value:
        return f"({', '.join(each.__name__ for each in value)},)"
    return repr(value).replace("'", '"')


def entry(name: str, text: str, note: str = "", *, indent: str = "") -> str:
    """Return a list entry: a name, a note in brackets, and a text."""
    head = f"{name} ({note})" if note else name
    plain = " ".join(f"{head}: {text.replace('``', '`')}".split())
    filled = fill(
        re.sub("`[^`]*`", lambda code: code[0].replace(" ", _UNBROKEN), plain),
        _WIDTH,
        initial_indent=f"{indent}- ",
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_UNBROKEN, " ")


def write(page: Path, lists: Mapping[str, str]) -> None:
    """Rewrite the generated sections of a page; raise ``PageError`` for a page without any."""
    marked = [name for name in lists if has_section(page, name)]
    for name in marked or lists:
        put_section(page, name, lists[name])


def main() -> str:
    """Rewrite pages, or print the lists; return the error message, or ""."""
    parser = argparse.ArgumentParser(description="Generate lists of the reference.")
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files with marked sections")
    parser.add_argument(
        "--adapter", metavar="MODULE:CLASS", help="list this adapter class, not this package's"
    )
    arguments = parser.parse_args()
    try:
        lists = shipped_sections()
        if arguments.adapter:
            lists |= sections(load_target(arguments.adapter))
        for page in arguments.pages:
            write(page, lists)
        for name, listed in lists.items() if not arguments.pages else ():
            print(f"## {name.capitalize()}\n\n{listed}")
    except (PageError, TargetError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main() or None)
