"""The extra ``serve``: nothing else imports it, and where it is missing, one is told."""

from __future__ import annotations

import ast
import json
import re
import tomllib

import pytest

from roseinfer.server import serve
from tests.layers import imports
from tests.python_process import ROOT, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA = PROJECT["optional-dependencies"]["serve"]
MODULES = {"prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop", "httptools"}


def test_the_extra_names_what_the_server_imports() -> None:
    named = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in EXTRA}
    assert named == MODULES | {"roseinfer"}  # with the extra for guides
    assert "roseinfer[guided]" in EXTRA
    assert set(serve._SERVE_MODULES) <= MODULES


@pytest.mark.parametrize("package", ["roseinfer", "pytest_roseinfer"])
def test_nothing_outside_of_its_rooms_imports_it(package: str) -> None:
    rooms = {ROOT / "roseinfer" / "server", ROOT / "roseinfer" / "replicas"}
    looked_at = 0
    for path in sorted((ROOT / package).rglob("*.py")):
        if rooms & {*path.parents}:
            continue
        looked_at += 1
        found = imports(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
        assert not MODULES & {each.target.split(".")[0] for each in found}, path
    assert looked_at > 50


WITHOUT = """
    import sys
    sys.stderr = sys.stdout
    sys.modules["{module}"] = None  # importing it fails
    from roseinfer.cli.model_options import Parser
    from roseinfer.server import serve as serve_command

    parser = Parser()
    serve_command.add_options(parser)
    print(serve_command.run(parser.parse_args([])))
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("module", serve._SERVE_MODULES)
def test_where_it_is_missing_one_is_told_what_installs_it(module: str) -> None:
    said = run_python(WITHOUT.format(module=module))
    assert f"the server needs {module}, which is not installed; run pip install '.[serve]'" in said
    assert said.splitlines()[-2:] == ["2", "False"]


def test_help_needs_none_of_it() -> None:
    code = f"""
        import sys
        for name in {sorted(MODULES)}:
            sys.modules[name] = None
        from roseinfer.cli.model_options import Parser
        from roseinfer.server import serve as serve_command

        parser = Parser()
        serve_command.add_options(parser)
        import json
        print(json.dumps(sorted(parser._option_string_actions)))
    """
    assert "--served-model-name" in json.loads(run_python(code))
