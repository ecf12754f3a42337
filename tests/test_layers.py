"""Directions of imports, and the modules that imports load."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING

import pytest

import roseinfer
import roseinfer._plugin
from pytest_roseinfer import KVCacheAdapter
from tests.layers import (
    TORCH_FREE,
    import_cycles,
    imports,
    missing_rooms,
    out_of_order,
    violations,
)
from tests.python_process import ROOT, run_python

if TYPE_CHECKING:
    from pathlib import Path

PUBLIC = frozenset(
    f"{module.__name__}.{name}"
    for module in (roseinfer, roseinfer._plugin)
    for name in module.__all__
)


def sources(*packages: str) -> dict[str, str]:
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def test_imports_follow_the_layers() -> None:
    assert violations(sources("roseinfer", "pytest_roseinfer"), PUBLIC) == []


def test_every_name_with_a_layer_exists() -> None:
    files = sources("roseinfer", "pytest_roseinfer")
    assert missing_rooms(files) == set()
    assert missing_rooms(path for path in files if "/kv/" not in path) == {"kv"}
    assert missing_rooms(path for path in files if "/histories/" not in path) == {"histories"}


def test_sources_include_both_packages() -> None:
    """No sources would have no violations."""
    files = sources("roseinfer", "pytest_roseinfer")
    assert files.keys() >= TORCH_FREE | {"roseinfer/config.py", "pytest_roseinfer/__init__.py"}


WRONG = {
    "kv_imports_attention": (
        "roseinfer/kv/pool.py",
        "from roseinfer.attention.decode import attend",
        "kv imports attention, which is above it",
    ),
    "kv_imports_engine_inside_a_function": (
        "roseinfer/kv/manager.py",
        "def f():\n    import roseinfer.engine.engine\n",
        "kv imports engine, which is above it",
    ),
    "kv_imports_bench_by_relative_import": (
        "roseinfer/kv/manager.py",
        "from ..bench import timing",
        "kv imports bench, which is above it",
    ),
    "kv_imports_model_by_name": (
        "roseinfer/kv/manager.py",
        "import importlib\nimportlib.import_module('roseinfer.models.causal')",
        "kv imports models, which is above it",
    ),
    "types_count_too": (
        "roseinfer/attention/decode.py",
        "if TYPE_CHECKING:\n    from roseinfer.engine import scheduler",
        "attention imports engine, which is above it",
    ),
    "errors_import_config": (
        "roseinfer/errors.py",
        "from roseinfer.config import AppendPolicy",
        "errors imports config, which is above it",
    ),
    "decode_imports_scheduler": (
        "roseinfer/decode/step.py",
        "from roseinfer.engine.scheduler import Scheduler",
        "decode imports engine, which is above it",
    ),
    "engine_imports_cli": (
        "roseinfer/engine/engine.py",
        "from roseinfer import cli",
        "engine imports cli, which is above it",
    ),
    "front_door_from_inside": (
        "roseinfer/kv/plan.py",
        "from roseinfer import KVBlockInfo",
        "kv imports roseinfer's front door",
    ),
    "engine_imports_the_plugin": (
        "roseinfer/engine/engine.py",
        "import pytest_roseinfer",
        "engine imports the plugin, which is above roseinfer",
    ),
    "cli_imports_the_plugin": (
        "roseinfer/cli/generate.py",
        "def f():\n    from pytest_roseinfer import conformance\n",
        "cli imports the plugin, which is above roseinfer",
    ),
    "module_without_a_layer": (
        "roseinfer/surprise.py",
        "",
        "roseinfer.surprise has no layer",
    ),
    "plan_imports_torch": (
        "roseinfer/kv/plan.py",
        "def f():\n    from torch import nn\n",
        "imports torch at run time",
    ),
    "pool_imports_triton": (
        "roseinfer/kv/pool.py",
        "import triton.language as tl",
        "imports triton at run time",
    ),
    "plugin_imports_a_submodule": (
        "pytest_roseinfer/run/machine.py",
        "from roseinfer.kv.pool import KVBlockInfo",
        "imports roseinfer.kv.pool.KVBlockInfo, which is neither a public name",
    ),
    "plugin_imports_a_module_whole": (
        "pytest_roseinfer/run/machine.py",
        "import roseinfer.kv",
        "imports roseinfer.kv, which is neither a public name",
    ),
    "plugin_imports_a_subpackage_by_name": (
        "pytest_roseinfer/run/machine.py",
        "from roseinfer import kv",
        "imports roseinfer.kv, which is neither a public name",
    ),
    "plugin_imports_the_private_module_whole": (
        "pytest_roseinfer/run/machine.py",
        "from roseinfer import _plugin",
        "imports roseinfer._plugin, which is neither a public name",
    ),
    "plugin_imports_a_private_name_as_a_public_one": (
        "pytest_roseinfer/run/machine.py",
        "from roseinfer import LayerTraits",
        "imports roseinfer.LayerTraits, which is neither a public name",
    ),
    "cli_imports_names_of_the_plugin": (
        "roseinfer/cli/generate.py",
        "from roseinfer._plugin import interrupts_kill",
        "cli imports _plugin, which is above it",
    ),
    "an_invariant_imports_the_machine": (
        "pytest_roseinfer/capabilities/storage.py",
        "if TYPE_CHECKING:\n    from pytest_roseinfer.run.machine import Machine",
        "capabilities imports run, which is above it",
    ),
    "findings_import_the_front_door": (
        "pytest_roseinfer/findings/divergence.py",
        "from pytest_roseinfer import conformance",
        "findings imports pytest_roseinfer's front door",
    ),
    "plugin_module_without_a_layer": (
        "pytest_roseinfer/surprise.py",
        "",
        "pytest_roseinfer.surprise has no layer",
    ),
    "environment": (
        "roseinfer/kernels/runtime.py",
        "import os\nos.environ.get('X')",
        "uses os.environ; only roseinfer/config.py may",
    ),
    "getenv": (
        "roseinfer/bench/kernels/append.py",
        "from os import getenv\n",
        "uses os.getenv; only roseinfer/config.py may",
    ),
}
RIGHT = {
    "downwards": (
        "roseinfer/engine/scheduler.py",
        "from roseinfer.kv.manager import KVBlockManager",
    ),
    "own_layer": ("roseinfer/kv/storage.py", "from roseinfer.kernels.runtime import why_unusable"),
    "types_of_torch": ("roseinfer/kv/plan.py", "if TYPE_CHECKING:\n    import torch"),
    "environment_in_config": ("roseinfer/config.py", "import os\nos.environ"),
    "public_name": ("pytest_roseinfer/run/machine.py", "from roseinfer import KVBlockManager"),
    "name_for_the_plugin": (
        "pytest_roseinfer/run/machine.py",
        "from roseinfer._plugin import did_you_mean",
    ),
    "plugin_itself": (
        "pytest_roseinfer/run/machine.py",
        "from pytest_roseinfer.oracle.oracle import Oracle",
    ),
    "settings_of_the_plugin": (
        "pytest_roseinfer/run/machine.py",
        "from pytest_roseinfer import settings",
    ),
    "top_uses_the_front_door": (
        "roseinfer/cli/__init__.py",
        "from roseinfer import KVBlockManager",
    ),
}


@pytest.mark.parametrize(("path", "source", "reason"), WRONG.values(), ids=WRONG)
def test_violation_is_found(path: str, source: str, reason: str) -> None:
    (violation,) = violations({path: source}, PUBLIC)
    assert violation.startswith(f"{path}:")
    assert reason in violation


@pytest.mark.parametrize(("path", "source"), RIGHT.values(), ids=RIGHT)
def test_allowed_import_is_no_violation(path: str, source: str) -> None:
    assert violations({path: source}, PUBLIC) == []


def test_the_private_module_has_what_the_plugin_imports_and_no_public_name() -> None:
    assert not {*roseinfer._plugin.__all__} & {*roseinfer.__all__}
    prefix = "roseinfer._plugin."
    imported = {
        each.target.removeprefix(prefix)
        for path, source in sources("pytest_roseinfer").items()
        for each in imports(path, ast.parse(source))
        if each.target.startswith(prefix)
    }
    assert sorted(imported) == roseinfer._plugin.__all__


def test_no_capability_imports_a_later_one() -> None:
    order = [each.methods.__module__ for each in KVCacheAdapter.capabilities]
    files = sources("pytest_roseinfer/capabilities")
    assert len(files) > len(order)
    assert out_of_order(files, order) == []


@pytest.mark.parametrize(
    ("module", "imported", "wrong"),
    [
        ("first", "from p.second import Two", True),
        ("first", "if TYPE_CHECKING:\n    from p import second", True),
        ("contract", "from p.first import One", True),
        ("second", "from p.first import One", False),
        ("second", "from p.contract import Contract", False),
    ],
)
def test_import_of_a_later_capability_is_found(module: str, imported: str, wrong: bool) -> None:
    lines = out_of_order({f"p/{module}.py": imported}, ["p.first", "p.second"])
    assert len(lines) == wrong


def test_packages_have_no_import_cycles() -> None:
    assert import_cycles(sources("roseinfer", "pytest_roseinfer")) == []


CYCLES: list[tuple[dict[str, str], list[str]]] = [
    ({"a": "import p.b", "b": "from p import a"}, ["p.a", "p.b"]),
    ({"a": "from p.b import f", "b": "import p.c", "c": "from . import a"}, ["p.a", "p.b", "p.c"]),
    ({"a": "if TYPE_CHECKING: import p.b", "b": "def f():\n import p.a"}, ["p.a", "p.b"]),
    ({"a": "import p.b", "b": "importlib.import_module('p.a')"}, ["p.a", "p.b"]),
    ({"__init__": "from p.a import f", "a": "from p import f"}, ["p", "p.a"]),
]


@pytest.mark.parametrize(("files", "cycle"), CYCLES)
def test_import_cycle_is_found(files: dict[str, str], cycle: list[str]) -> None:
    others = {"p/__init__.py": "", "p/z.py": "import p.a"}
    assert import_cycles({**others, **{f"p/{name}.py": text for name, text in files.items()}}) == [
        cycle
    ]


LOADED = "; import json, sys; print(json.dumps([m for m in {heavy} if m in sys.modules]))"


def loaded_by(statement: str, *heavy: str) -> list[str]:
    """Return which of ``heavy`` a fresh process has imported after ``statement``."""
    names: list[str] = json.loads(run_python(statement + LOADED.format(heavy=heavy)))
    return names


@pytest.mark.parametrize("module", ["roseinfer", "roseinfer._plugin"])
def test_importing_the_package_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}", "torch", "triton", "transformers", "numpy") == []


def test_importing_plans_loads_nothing_heavy() -> None:
    statement = "import roseinfer.kv.plan, roseinfer.kv.pool, roseinfer.paths"
    assert loaded_by(statement, "torch", "triton", "transformers", "numpy") == []


def test_importing_the_cache_loads_torch_and_no_transformers() -> None:
    statement = "from roseinfer import KVBlockManager, AppendPolicy"
    assert loaded_by(statement, "torch", "transformers", "roseinfer.kernels.triton.append") == [
        "torch"
    ]


def test_importing_an_adapter_class_loads_nothing_heavy() -> None:
    statement = "from pytest_roseinfer import CacheSpec, EngineAdapter, KVCacheAdapter"
    assert loaded_by(statement, "torch", "triton", "transformers", "numpy", "hypothesis") == []


IMPORT_KERNELS = """
    import triton
    import triton.compiler

    def compile(*args, **kwargs):
        raise SystemExit("a kernel was compiled by importing it")

    triton.compile = triton.compiler.compile = triton.compiler.compiler.compile = compile
    from roseinfer.kernels.triton import append as append_triton
    from roseinfer.kernels.triton import clone as clone_triton

    from roseinfer.kernels.runtime import is_interpreted

    assert not is_interpreted()
    for kernel in (append_triton._gather_kernel, append_triton._full_batch_kernel,
                   append_triton._identity_pos_kernel, clone_triton._clone_kernel):
        assert not kernel.jit.device_caches, kernel.name
    print("imported")
"""


def test_importing_the_kernels_compiles_nothing(tmp_path: Path) -> None:
    assert run_python(IMPORT_KERNELS, TRITON_CACHE_DIR=str(tmp_path)) == "imported\n"
    assert not list(tmp_path.iterdir())
