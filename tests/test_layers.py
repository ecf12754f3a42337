"""Imports go one way, and importing costs nothing that was not asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import roseinfer
from pytest_roseinfer import KVCacheAdapter
from tests.layers import (
    TORCH_FREE,
    circles,
    missing_rooms,
    out_of_order,
    violations,
)
from tests.python_process import ROOT, run_python

if TYPE_CHECKING:
    from pathlib import Path

PUBLIC = frozenset(roseinfer.__all__)


def sources(*packages: str) -> dict[str, str]:
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def test_no_import_goes_against_the_layers() -> None:
    assert violations(sources("roseinfer", "pytest_roseinfer"), PUBLIC) == []


def test_every_layer_is_there() -> None:
    found = sources("roseinfer", "pytest_roseinfer")
    assert missing_rooms(found) == set()
    assert missing_rooms(path for path in found if "/kv/" not in path) == {"kv"}
    assert missing_rooms(path for path in found if "/histories/" not in path) == {"histories"}


def test_the_packages_were_looked_at() -> None:
    """An empty list of violations of nothing would be no news."""
    found = sources("roseinfer", "pytest_roseinfer")
    assert found.keys() >= TORCH_FREE | {"roseinfer/config.py", "pytest_roseinfer/__init__.py"}


WRONG = {
    "kv_imports_attention": (
        "roseinfer/kv/pool.py",
        "from roseinfer.attention.decode import attend",
        "kv imports attention, which stands above it",
    ),
    "kv_imports_engine_inside_a_function": (
        "roseinfer/kv/manager.py",
        "def f():\n    import roseinfer.engine.engine\n",
        "kv imports engine, which stands above it",
    ),
    "kv_imports_bench_by_relative_import": (
        "roseinfer/kv/manager.py",
        "from ..bench import timing",
        "kv imports bench, which stands above it",
    ),
    "kv_imports_model_by_name": (
        "roseinfer/kv/manager.py",
        "import importlib\nimportlib.import_module('roseinfer.models.causal')",
        "kv imports models, which stands above it",
    ),
    "types_count_too": (
        "roseinfer/attention/decode.py",
        "if TYPE_CHECKING:\n    from roseinfer.engine import scheduler",
        "attention imports engine, which stands above it",
    ),
    "errors_import_config": (
        "roseinfer/errors.py",
        "from roseinfer.config import AppendPolicy",
        "errors imports config, which stands above it",
    ),
    "decode_imports_scheduler": (
        "roseinfer/decode/step.py",
        "from roseinfer.engine.scheduler import Scheduler",
        "decode imports engine, which stands above it",
    ),
    "engine_imports_cli": (
        "roseinfer/engine/engine.py",
        "from roseinfer import cli",
        "engine imports cli, which stands above it",
    ),
    "front_door_from_inside": (
        "roseinfer/kv/plan.py",
        "from roseinfer import KVBlockInfo",
        "kv imports roseinfer's front door",
    ),
    "engine_imports_the_plugin": (
        "roseinfer/engine/engine.py",
        "import pytest_roseinfer",
        "engine imports the plugin, which stands above roseinfer",
    ),
    "cli_imports_the_plugin": (
        "roseinfer/cli/generate.py",
        "def f():\n    from pytest_roseinfer import conformance\n",
        "cli imports the plugin, which stands above roseinfer",
    ),
    "a_module_nobody_placed": (
        "roseinfer/surprise.py",
        "",
        "roseinfer.surprise has no place in the layers",
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
        "imports roseinfer.kv.pool.KVBlockInfo, which is no public name",
    ),
    "plugin_imports_a_module_whole": (
        "pytest_roseinfer/run/machine.py",
        "import roseinfer.kv",
        "imports roseinfer.kv, which is no public name",
    ),
    "plugin_imports_a_subpackage_by_name": (
        "pytest_roseinfer/run/machine.py",
        "from roseinfer import kv",
        "imports roseinfer.kv, which is no public name",
    ),
    "an_invariant_imports_the_machine": (
        "pytest_roseinfer/capabilities/storage.py",
        "if TYPE_CHECKING:\n    from pytest_roseinfer.run.machine import Machine",
        "capabilities imports run, which stands above it",
    ),
    "findings_import_the_front_door": (
        "pytest_roseinfer/findings/divergence.py",
        "from pytest_roseinfer import conformance",
        "findings imports pytest_roseinfer's front door",
    ),
    "a_module_of_the_plugin_that_nobody_placed": (
        "pytest_roseinfer/surprise.py",
        "",
        "pytest_roseinfer.surprise has no place in the layers",
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
def test_a_violation_is_caught(path: str, source: str, reason: str) -> None:
    (found,) = violations({path: source}, PUBLIC)
    assert found.startswith(f"{path}:")
    assert reason in found


@pytest.mark.parametrize(("path", "source"), RIGHT.values(), ids=RIGHT)
def test_what_is_allowed_is_left_alone(path: str, source: str) -> None:
    assert violations({path: source}, PUBLIC) == []


def test_no_capability_imports_a_later_one() -> None:
    order = [each.methods.__module__ for each in KVCacheAdapter.capabilities]
    found = sources("pytest_roseinfer/capabilities")
    assert len(found) > len(order)
    assert out_of_order(found, order) == []


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
def test_an_import_of_a_later_module_is_caught(module: str, imported: str, wrong: bool) -> None:
    found = out_of_order({f"p/{module}.py": imported}, ["p.first", "p.second"])
    assert len(found) == wrong


def test_no_module_imports_what_imports_it() -> None:
    assert circles(sources("roseinfer", "pytest_roseinfer")) == []


CIRCLES: list[tuple[dict[str, str], list[str]]] = [
    ({"a": "import p.b", "b": "from p import a"}, ["p.a", "p.b"]),
    ({"a": "from p.b import f", "b": "import p.c", "c": "from . import a"}, ["p.a", "p.b", "p.c"]),
    ({"a": "if TYPE_CHECKING: import p.b", "b": "def f():\n import p.a"}, ["p.a", "p.b"]),
    ({"a": "import p.b", "b": "importlib.import_module('p.a')"}, ["p.a", "p.b"]),
    ({"__init__": "from p.a import f", "a": "from p import f"}, ["p", "p.a"]),
]


@pytest.mark.parametrize(("files", "circle"), CIRCLES)
def test_a_circle_is_found(files: dict[str, str], circle: list[str]) -> None:
    beside = {"p/__init__.py": "", "p/z.py": "import p.a"}
    assert circles({**beside, **{f"p/{name}.py": text for name, text in files.items()}}) == [circle]


LOADED = "; import json, sys; print(json.dumps([m for m in {heavy} if m in sys.modules]))"


def loaded_by(statement: str, *heavy: str) -> list[str]:
    """Which of ``heavy`` a fresh process has imported after ``statement``."""
    names: list[str] = json.loads(run_python(statement + LOADED.format(heavy=heavy)))
    return names


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import roseinfer", "torch", "triton", "transformers", "numpy") == []


def test_importing_the_planning_loads_nothing_heavy() -> None:
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
        assert not kernel.device_caches, kernel
    print("imported")
"""


def test_importing_the_kernels_compiles_nothing(tmp_path: Path) -> None:
    assert run_python(IMPORT_KERNELS, TRITON_CACHE_DIR=str(tmp_path)) == "imported\n"
    assert not list(tmp_path.iterdir())
