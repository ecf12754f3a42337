"""Rules for imports, as a function from sources to violations.

The function takes sources instead of files, so that tests can pass sources that break a rule.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

ENGINE_LAYERS = (
    {"errors", "garbage", "imports", "paths"},
    {
        "config",
        "guided",
        "sampling_params",
        "text",
        "terminal",
        "layer_traits",
    },
    {"kernels"},
    {"kv"},
    {"attention"},
    {"distributed"},
    {"models", "sampling", "distributed.sharding"},
    {"decode"},
    {"engine"},
    {"distributed.follower"},
    {"llm", "distributed.__main__"},
    {"engine_thread"},
    {"async_llm"},
    {"cli", "server", "engine_client", "replicas", "bench", "__main__"}
    | {"benchmark_scheduler", "benchmark_streaming"},
    {"_plugin"},
)
PLUGIN_LAYERS = (
    {"settings", "words"},
    {"oracle"},
    {"environment"},
    {"capabilities", "engine_capabilities"},
    {"adapters"},
    {"histories"},
    {"findings"},
    {"run"},
    {"engines"},
    {"search"},
    {"gates"},
    {"report"},
    {"targets", "endpoint"},
    {"suite"},
    {"plugin"},
)
RANKS = {
    package: {module: rank for rank, layer in enumerate(layers) for module in layer}
    for package, layers in (("roseinfer", ENGINE_LAYERS), ("pytest_roseinfer", PLUGIN_LAYERS))
}
"""Layer numbers of each package's rooms, and of files with a layer of their own. Each imports only
from its own layer and earlier ones."""
TOP = RANKS["roseinfer"]["cli"]
TORCH_FREE = {f"roseinfer/{name}.py" for name in ("kv/pool", "kv/plan", "paths")}
HEAVY = {"torch", "triton", "transformers"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
READS_ENVIRONMENT = "roseinfer/config.py"


@dataclass(frozen=True)
class Import:
    target: str
    """Dotted name, an imported name included: ``roseinfer.kv.plan.AppendPlan``."""
    line: int
    at_runtime: bool


def missing_rooms(paths: Iterable[str]) -> set[str]:
    """Return names that have a layer and are no room or file of their package."""
    modules = {".".join(PurePath(path).with_suffix("").parts) for path in paths}
    return {
        room
        for package, ranks in RANKS.items()
        for room in ranks
        if not any(f"{path}.".startswith(f"{package}.{room}.") for path in modules)
    }


def violations(sources: Mapping[str, str], public: frozenset[str]) -> list[str]:
    """Return the violations in ``sources``, a mapping from path to text, as ``path:line: reason``.

    ``public`` are the public names of roseinfer.
    """
    lines: list[str] = []
    for path, source in sources.items():
        tree = ast.parse(source)
        reasons = [*_import_reasons(path, tree, public)]
        if path.startswith("roseinfer/") and path != READS_ENVIRONMENT:
            reasons += _environment_reasons(tree)
        lines += [f"{path}:{line}: {reason}" for line, reason in reasons]
    return lines


def _import_reasons(
    path: str, tree: ast.Module, public: frozenset[str]
) -> Iterator[tuple[int, str]]:
    package = path.split("/")[0]
    module = module_of(path)
    front_door = path == f"{package}/__init__.py"
    if package in RANKS and not front_door and module not in RANKS[package]:
        yield 1, f"{package}.{module} has no layer: add it to tests/layers.py"
        return
    for each in imports(path, tree):
        root = each.target.split(".")[0]
        if path in TORCH_FREE and root in HEAVY and each.at_runtime:
            yield each.line, f"imports {root} at run time"
        reason = None
        if package in RANKS and not front_door:
            reason = _layer_violation(package, module, each.target)
        if package == "pytest_roseinfer":
            reason = reason or _private_import(each.target, public)
        if reason:
            yield each.line, reason


def _layer_violation(package: str, module: str, target: str) -> str | None:
    root, *rest = target.split(".")
    ranks = RANKS[package]
    if package == "roseinfer" and root == "pytest_roseinfer":
        return f"{module} imports the plugin, which is above roseinfer"
    if root != package:
        return None
    room = room_of(package, rest)
    if room not in ranks:
        above = package == "roseinfer" and ranks[module] == TOP
        return None if above else f"{module} imports {package}'s front door"
    if ranks[room] > ranks[module]:
        return f"{module} imports {room}, which is above it"
    return None


def _private_import(target: str, public: frozenset[str]) -> str | None:
    if target.startswith("roseinfer.") and target not in public:
        return f"imports {target}, which is neither a public name nor one of roseinfer._plugin"
    return None


def _environment_reasons(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: set[str] = set()
        line = 0
        if isinstance(node, ast.Attribute):
            names, line = {node.attr}, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names, line = {alias.name for alias in node.names}, node.lineno
        for name in names & ENVIRONMENT:
            yield line, f"uses os.{name}; only {READS_ENVIRONMENT} may"


def module_of(path: str) -> str:
    """``roseinfer/kv/pool.py`` -> ``kv``; ``roseinfer/llm.py`` -> ``llm``."""
    package, *rest = path.removesuffix(".py").split("/")
    return room_of(package, rest)


def room_of(package: str, rest: Sequence[str]) -> str:
    """Return the room of a module, or the module where that has a layer of its own."""
    own = ".".join(rest[:2])
    return own if own in RANKS.get(package, ()) else "".join(rest[:1])


def imports(path: str, tree: ast.Module) -> Iterator[Import]:
    """Yield every import in a file, at any depth, by statement or by ``import_module``."""
    nodes = list(ast.walk(tree))
    type_only = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        if isinstance(node, (ast.stmt, ast.expr)):
            for target in _targets(path, node):
                yield Import(target, node.lineno, id(node) not in type_only)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _targets(path: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _base(path, node)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        name = node.args[0]
        if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
            return [str(name.value)]
    return []


def _base(path: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that is imported from."""
    if not node.level:
        return node.module or ""
    package = path.split("/")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def import_cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return cycles of modules that import each other, of any length; type-only imports count."""
    paths = {_dotted(path): path for path in sources}
    graph = {
        module: {
            imported
            for each in imports(path, ast.parse(sources[path]))
            if (imported := _module_in(each.target, paths)) not in (None, module)
        }
        for module, path in paths.items()
    }
    reachable = {module: _reachable(module, graph) for module in graph}
    cycles = {
        tuple(sorted(other for other in reachable[module] if module in reachable[other]))
        for module in graph
    }
    return sorted(list(cycle) for cycle in cycles if cycle)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _module_in(target: str, modules: Collection[str]) -> str | None:
    """Return the module that a dotted name is, or is in."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def _reachable(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Return all modules that a module imports, directly or not."""
    reachable: set[str] = set()
    pending = [module]
    while pending:
        new = graph[pending.pop()] - reachable
        reachable |= new
        pending += new
    return reachable


def out_of_order(sources: Mapping[str, str], order: Sequence[str]) -> list[str]:
    """Return the imports of a module of ``order`` by one before it, or by one that is not in it.

    ``sources`` are the modules of one folder.
    """
    ranks = {module: rank for rank, module in enumerate(order)}
    lines = []
    for path, source in sources.items():
        own = ranks.get(_dotted(path), -1)
        for each in imports(path, ast.parse(source)):
            module = _module_in(each.target, ranks)
            if module is not None and ranks[module] > own:
                lines.append(f"{path}:{each.line}: imports {module}, which comes later")
    return lines
