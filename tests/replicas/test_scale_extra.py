"""The extra ``scale``: only replicas import Ray."""

from __future__ import annotations

import ast
import tomllib

import pytest

from roseinfer.config import ServerConfig
from roseinfer.errors import ConfigError
from roseinfer.replicas.spec import ReplicaSpec
from tests.layers import imports
from tests.python_process import ROOT, run_python

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CLUSTER = ROOT / "roseinfer" / "replicas" / "cluster.py"
COMMAND = """
    import sys
    sys.stderr = sys.stdout
    from roseinfer.cli.model_options import Parser
    from roseinfer.server import serve as serve_command

    parser = Parser()
    serve_command.add_options(parser)
"""


def test_extra_lists_ray() -> None:
    assert [each.partition(">=")[0] for each in EXTRAS["scale"]] == [
        "roseinfer[serve]",
        "ray[serve]",
    ]


@pytest.mark.slow
def test_one_module_imports_ray() -> None:
    importing_modules = {}
    for package in ("roseinfer", "pytest_roseinfer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if any(
                each.target.split(".")[0] == "ray"
                for each in imports(name, ast.parse(path.read_text()))
            ):
                importing_modules[path.name] = name
    assert importing_modules.keys() == {"deployment.py"}


def test_missing_ray_is_reported_with_the_install_command() -> None:
    run = """
    sys.modules["ray"] = None  # importing it fails
    print(serve_command.run(parser.parse_args(["--replicas", "2"])))
    print("torch" in sys.modules)
    """
    output = run_python(COMMAND + run).splitlines()
    assert output[0].startswith(
        "roseinfer serve: replicas need ray.serve, which is not installed; "
    )
    assert "pip install '.[scale]'" in output[0]
    assert output[1:] == ["2", "False"]


def test_single_process_server_does_not_search_for_ray() -> None:
    run = """
    class Told:
        def find_spec(self, name, path=None, target=None):
            assert name.split(".")[0] != "ray", name
    sys.meta_path.insert(0, Told())
    print(serve_command.run(parser.parse_args(["--model", "/nowhere"])))
    """
    output = run_python(COMMAND + run).splitlines()
    assert output[-1] == "2"
    assert "there is no such directory" in output[0]


@pytest.mark.parametrize("replicas", [0, -1])
def test_replicas_must_be_at_least_one(replicas: int) -> None:
    with pytest.raises(ConfigError, match="replicas must be a whole number of at least 1"):
        ServerConfig(replicas=replicas)


def replica_spec(device: str | None, replicas: int = 2) -> ReplicaSpec:
    return ReplicaSpec("tiny", device, None, {}, ServerConfig(replicas=replicas), None)


def test_each_replica_gets_a_gpu_if_there_are_any() -> None:
    assert replica_spec("cpu").gpus_per_replica(8) == 0
    assert replica_spec(None).gpus_per_replica(0) == 0
    assert replica_spec(None).gpus_per_replica(2) == replica_spec("cuda").gpus_per_replica(2) == 1
    with pytest.raises(ConfigError, match="--replicas 3: each needs a GPU, and 2 are available"):
        replica_spec(None, 3).gpus_per_replica(2)
    with pytest.raises(ConfigError, match="each needs a GPU, and 0 are available"):
        replica_spec("cuda").gpus_per_replica(0)
    with pytest.raises(ConfigError, match="--device cuda:1: it is one GPU"):
        replica_spec("cuda:1")
    with pytest.raises(ConfigError, match="cannot be combined with --tensor-parallel-size"):
        ReplicaSpec("tiny", None, None, {"tensor_parallel_size": 2}, ServerConfig(replicas=2), None)
