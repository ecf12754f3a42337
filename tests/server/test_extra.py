"""The extra ``serve``: only the server imports it, and a missing part is reported."""

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


def test_extra_lists_the_imports_of_the_server() -> None:
    named = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in EXTRA}
    assert named == MODULES | {"roseinfer"}  # with the extra for guides
    assert "roseinfer[guided]" in EXTRA
    assert set(serve._SERVE_MODULES) <= MODULES


@pytest.mark.parametrize("package", ["roseinfer", "pytest_roseinfer"])
def test_only_the_server_imports_the_extra(package: str) -> None:
    rooms = {ROOT / "roseinfer" / "server", ROOT / "roseinfer" / "replicas"}
    num_files = 0
    for path in sorted((ROOT / package).rglob("*.py")):
        if rooms & {*path.parents}:
            continue
        num_files += 1
        imported = imports(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
        assert not MODULES & {each.target.split(".")[0] for each in imported}, path
    assert num_files > 50, f"expected more than 50 files, got {num_files}"


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


@pytest.mark.sampled_cases
@pytest.mark.parametrize("module", serve._SERVE_MODULES)
def test_missing_module_is_reported_with_the_install_command(module: str) -> None:
    output = run_python(WITHOUT.format(module=module))
    assert (
        f"the server needs {module}, which is not installed; run pip install '.[serve]'" in output
    )
    assert output.splitlines()[-2:] == ["2", "False"]


def test_options_work_without_the_extra() -> None:
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
