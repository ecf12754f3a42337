"""Try a built distribution as a user would: in a fresh environment, in an empty folder.

``python -m tests.installed dist/roseinfer-*.whl`` makes an environment of this Python, installs the
file, and runs the tutorial's ten lines, both as printed and with a bug.

With ``--lowest`` direct dependencies have the lowest versions that the project names, and with
``--constraint`` those of a file. ``--torch`` installs another torch first, which must stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.tutorials.printed import list_cache

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("roseinfer", "pytest_roseinfer")


class InstalledDistribution:
    """A fresh environment that has the distribution, and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        venv.create(folder / "env", with_pip=True)
        self._bin = folder / "env" / "bin"

    def install(self, requirement: str, *constraints: Path) -> None:
        options = [part for each in constraints for part in ("--constraint", str(each))]
        self.run("python", "-m", "pip", "install", "-q", *options, requirement)

    def torch_version(self) -> str:
        return self.run("python", "-c", "import torch; print(torch.__version__)")

    def run(self, command: str, *arguments: str, status: int = 0) -> str:
        """Return the output of a command, which must exit with this status."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [self._bin / command, *arguments],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode != status:
            print(done.stdout)
            raise SystemExit(f"{command} {' '.join(arguments)}: exit status {done.returncode}")
        return done.stdout.strip()


def lowest_versions() -> list[str]:
    """Return constraints that pin each direct dependency to its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        re.sub(r"^([\w-]+)>=([\w.]+)", r"\1==\2", requirement)
        for requirement in project["dependencies"]
    ]


def try_it(installed: InstalledDistribution) -> None:
    """Import both packages, run both commands, and find a bug in the tutorial's cache."""
    places = json.loads(
        installed.run(
            "python",
            "-c",
            f"import json, importlib\nprint(json.dumps([importlib.import_module(name).__file__ "
            f"for name in {MODULES}]))",
        ).splitlines()[-1]
    )
    outside = [place for place in places if "site-packages" not in place]
    if outside:
        raise SystemExit(f"imported from {outside}, not from the installed distribution")
    print(installed.run("roseinfer", "--version"))
    installed.run("roseinfer", "generate", "--prompt", "Once upon a time", "--device", "cpu")
    test_file = installed.folder / "test_my_cache.py"
    test_file.write_text(list_cache(), encoding="utf-8")
    print(installed.run("pytest", "test_my_cache.py", "--roseinfer-seed", "1").splitlines()[-1])
    test_file.write_text(list_cache().replace("key[:, i]", "key[:, 0]"), encoding="utf-8")
    output = installed.run("pytest", "test_my_cache.py", "--roseinfer-seed", "1", status=1)
    if "expected sequence 1, token 0, found sequence 0, token 0" not in output:
        print(output)
        raise SystemExit("the tutorial's bug was not found as printed")
    print(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.installed")
    parser.add_argument("file", type=Path, help="wheel or sdist")
    parser.add_argument("--constraint", type=Path, action="append", default=[])
    parser.add_argument("--lowest", action="store_true", help="lowest versions of dependencies")
    parser.add_argument("--torch", metavar="REQUIREMENT", help="torch that is there before")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        installed = InstalledDistribution(Path(folder))
        if args.torch:
            installed.install(args.torch)
        before = installed.torch_version() if args.torch else None
        constraints = [each.resolve() for each in args.constraint]
        if args.lowest:
            constraints.append(Path(folder) / "lowest.txt")
            constraints[-1].write_text("\n".join(lowest_versions()), encoding="utf-8")
        installed.install(str(args.file.resolve()), *constraints)
        after = installed.torch_version()
        print(f"Python {sys.version.split()[0]}, torch {after}")
        if before not in (None, after):
            raise SystemExit(f"torch {before} was replaced by {after}")
        try_it(installed)


if __name__ == "__main__":
    main()
