"""The extra ``scale``: Ray is imported where replicas are asked for, and nowhere else."""

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


def test_the_extra_names_ray() -> None:
    assert [each.partition(">=")[0] for each in EXTRAS["scale"]] == [
        "roseinfer[serve]",
        "ray[serve]",
    ]


def test_one_file_imports_it_and_a_replica_asks_it_who_it_is() -> None:
    found = {}
    for package in ("roseinfer", "pytest_roseinfer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if any(
                each.target.split(".")[0] == "ray"
                for each in imports(name, ast.parse(path.read_text()))
            ):
                found[path.name] = name
    assert found.keys() == {"deployment.py"}


def test_where_it_is_missing_one_is_told_what_installs_it() -> None:
    run = """
    sys.modules["ray"] = None  # importing it fails
    print(serve_command.run(parser.parse_args(["--replicas", "2"])))
    print("torch" in sys.modules)
    """
    said = run_python(COMMAND + run).splitlines()
    assert said[0].startswith("roseinfer serve: replicas need ray.serve, which is not installed; ")
    assert "pip install '.[scale]'" in said[0]
    assert said[1:] == ["2", "False"]


def test_a_server_of_one_process_does_not_look_for_it() -> None:
    run = """
    class Told:
        def find_spec(self, name, path=None, target=None):
            assert name.split(".")[0] != "ray", name
    sys.meta_path.insert(0, Told())
    print(serve_command.run(parser.parse_args(["--model", "/nowhere"])))
    """
    said = run_python(COMMAND + run).splitlines()
    assert said[-1] == "2"
    assert "there is no such directory" in said[0]


@pytest.mark.parametrize("replicas", [0, -1])
def test_there_is_one_at_least(replicas: int) -> None:
    with pytest.raises(ConfigError, match="replicas must be a whole number of at least 1"):
        ServerConfig(replicas=replicas)


def deployed(device: str | None, replicas: int = 2) -> ReplicaSpec:
    return ReplicaSpec("tiny", device, None, {}, ServerConfig(replicas=replicas), None)


def test_each_replica_gets_a_gpu_of_its_own_where_there_are_any() -> None:
    assert deployed("cpu").gpus_per_replica(8) == 0
    assert deployed(None).gpus_per_replica(0) == 0
    assert deployed(None).gpus_per_replica(2) == deployed("cuda").gpus_per_replica(2) == 1
    with pytest.raises(ConfigError, match="--replicas 3: each needs a GPU, and 2 are available"):
        deployed(None, 3).gpus_per_replica(2)
    with pytest.raises(ConfigError, match="each needs a GPU, and 0 are available"):
        deployed("cuda").gpus_per_replica(0)
    with pytest.raises(ConfigError, match="--device cuda:1: it is one GPU"):
        deployed("cuda:1")
    with pytest.raises(ConfigError, match="cannot be combined with --tensor-parallel-size"):
        ReplicaSpec("tiny", None, None, {"tensor_parallel_size": 2}, ServerConfig(replicas=2), None)
