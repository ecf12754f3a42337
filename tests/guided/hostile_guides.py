"""Randomly drawn hostile guides: ``python -m tests.guided.hostile_guides --guides 1000``.

Each is compiled, and a completion that it allows is started, or it is rejected with a reason. A
compiled guide keeps the bounds of its numbers exactly. Other guides keep working meanwhile.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from roseinfer import BadArgument, Guide
from roseinfer.guided.compiler import GuideCompiler
from roseinfer.guided.grammar import MAX_EXACT_INTEGER
from roseinfer.models.tiny import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 257
_NEAR = (0, 1, 9, 10, 99, 1 << 31, 1 << 32, 1 << 52, MAX_EXACT_INTEGER, 1 << 60, 1 << 63, 1 << 64)
_STEPS = 20


def new_compiler(cpu_seconds: float = 0.3, memory_mb: int = 128) -> GuideCompiler:
    return GuideCompiler(
        byte_tokenizer(), VOCABULARY, {256}, cpu_seconds=cpu_seconds, memory_mb=memory_mb
    )


def allows(compiler: GuideCompiler, guide: Guide, text: str) -> bool:
    """Return True if a text matches a guide."""
    matcher: Any = compiler.new_matcher(guide)._matcher
    num_consumed = matcher.try_consume_tokens(list(text.encode()))
    return bool(num_consumed == len(text) and matcher.is_accepting())


def draw_bound(rng: random.Random) -> int | float:
    if rng.random() < 0.05:
        return rng.choice((1e29, -1e30, 1e300, -1e17))
    return rng.choice((1, -1)) * (rng.choice(_NEAR) + rng.randint(-2, 2))


def draw_integer(rng: random.Random) -> dict[str, Any]:
    """Draw a schema of integers with bounds of either kind, or with one of them."""
    low, high = sorted((draw_bound(rng), draw_bound(rng)))
    names = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
    bounds = dict(zip(names, (low, high), strict=True))
    if rng.random() < 0.3:
        del bounds[rng.choice(names)]
    return {"type": "integer"} | bounds


def _draw_number(rng: random.Random) -> Guide:
    kind = rng.choice(("number", "integer"))
    schema = draw_integer(rng) | {"type": kind}
    if rng.random() < 0.3:
        schema = {"type": kind, "multipleOf": rng.choice((7, 1 << 24, 1 << 31, 999_983, 1e-9))}
    if rng.random() < 0.3:
        schema = {rng.choice(("const", "enum")): [rng.choice(_NEAR), -(1 << 63)]}
    return _embed(rng, schema)


def _draw_pattern(rng: random.Random) -> Guide:
    unit = rng.choice(("a?", "(a|b)*a", "(a?b?)*", r"\p{L}?", "[a-z]{0,9}", "(", ")", "a{999}"))
    pattern = (unit * rng.choice((3, 300, 6000, 15_000)))[:30_000]
    if rng.random() < 0.5:
        return Guide(regex=pattern)
    return _embed(rng, {"type": "string", "pattern": pattern})


def _draw_sizes(rng: random.Random) -> Guide:
    name, kind = rng.choice(
        (
            ("minItems", "array"),
            ("maxItems", "array"),
            ("minLength", "string"),
            ("maxLength", "string"),
            ("minProperties", "object"),
        )
    )
    return _embed(rng, {"type": kind, name: rng.choice((0, 1, 1000, 1 << 20, 1 << 40, 1 << 70))})


def _draw_depth(rng: random.Random) -> Guide:
    depth = rng.choice((3, 60, 400))
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = rng.choice(
            (
                {"type": "array", "items": schema},
                {"anyOf": [schema, {"type": "null"}]},
                {"allOf": [schema]},
            )
        )
    return Guide(json_schema=schema)


def _draw_rules(rng: random.Random) -> Guide:
    count = rng.choice((5, 60, 1500))
    body = rng.choice(("r{0} r{0}", 'r{0} | r{0} "a"', 'r{0} | "" | r{1}'))
    rules = [f"r{at}: {body.format(at + 1, at)}" for at in range(count)]
    return Guide(grammar="\n".join(["start: r0", *rules, f'r{count}: "z" | ""']))


def _embed(rng: random.Random, schema: dict[str, Any]) -> Guide:
    """Draw the place of a schema in a guide."""
    schemas: tuple[dict[str, Any], ...] = (
        schema,
        {"type": "object", "properties": {"default": schema}, "required": ["default"]},
        {"type": "array", "items": schema, "minItems": 1},
        {"$ref": "#/$defs/minimum", "$defs": {"minimum": schema}},
        {"anyOf": [schema, {"type": "null"}]},
    )
    root = rng.choice(schemas)
    if rng.random() < 0.3:
        return Guide(grammar=f"start: %json {Guide(json_schema=root).json_schema}")
    return Guide(json_schema=root)


_KINDS: tuple[Callable[[random.Random], Guide], ...] = (
    _draw_number,
    _draw_number,
    _draw_pattern,
    _draw_sizes,
    _draw_depth,
    _draw_rules,
)


def draw_guide(rng: random.Random) -> Guide:
    return rng.choice(_KINDS)(rng)


def attempt(compiler: GuideCompiler, guide: Guide) -> str:
    """Compile a guide and start a completion; return the outcome."""
    try:
        matcher = compiler.new_matcher(guide)
    except BadArgument as error:
        words = ("processor time", "of memory", "crashed", "are exact")
        return next((word for word in words if word in str(error)), "refused")
    row = np.zeros((VOCABULARY + 31) // 32, np.uint32)
    for _ in range(_STEPS):
        matcher.fill_bitmask(row)
        if matcher.has_failed:
            return "too hard to follow"
        bits = [at for at in range(256) if int(row[at // 32]) >> at % 32 & 1]
        if not bits or matcher.accept_token(bits[len(bits) // 2]):
            break
    return "followed"


def check_bounds(compiler: GuideCompiler, schema: dict[str, Any]) -> bool:
    """Compare the numbers that an integer schema allows with its bounds, unless it is rejected."""
    guide = Guide(json_schema=schema)
    try:
        compiler.new_matcher(guide)
    except BadArgument:
        return False
    low = max(schema.get("minimum", -(1 << 70)), schema.get("exclusiveMinimum", -(1 << 70)) + 1)
    high = min(schema.get("maximum", 1 << 70), schema.get("exclusiveMaximum", 1 << 70) - 1)
    for number in {
        each + offset for each in schema.values() if each != "integer" for offset in (-1, 0, 1)
    }:
        assert allows(compiler, guide, str(number)) == (low <= number <= high), (schema, number)
    return True


def run(seed: int, guides: int) -> Counter[str]:
    """Try drawn guides, and count the outcomes."""
    rng = random.Random(seed)
    compiler = new_compiler()
    outcomes: Counter[str] = Counter()
    for number in range(guides):
        outcomes[attempt(compiler, draw_guide(rng))] += 1
        outcomes["exact"] += check_bounds(compiler, draw_integer(rng))
        assert allows(compiler, Guide(regex=f"somebody's {number}"), f"somebody's {number}")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guides", type=int, default=200)
    options = parser.parse_args()
    print(dict(run(options.seed, options.guides)))


if __name__ == "__main__":
    main()
