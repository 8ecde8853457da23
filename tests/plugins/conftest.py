"""The package of docs/writing-a-stage.md, built, and environments to install it in."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.plugins import files_in

DOCUMENT = Path(__file__).parents[2] / "docs" / "writing-a-stage.md"


class Environment:
    """A Python environment that also sees the packages of the running one."""

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.python = folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        # addsitedir, unlike a plain path, follows the .pth files of editable installs
        lines = [f"import site; site.addsitedir({path!r})" for path in outer]
        (site / "outer.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(self, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run `python ARGS` in it, without the variables that pytest added to this process's
        environment."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python), *args]
        return subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)

    def pipe(self, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run `pipe ARGS` as if typed in the folder `cwd`."""
        return self.run("-m", "pipetrain", *args, cwd=cwd)

    def pip(self, *args: str) -> None:
        """Run `pip ARGS` on this environment, without network."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *args]
        subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the document's files and nothing else."""
    folder = tmp_path_factory.mktemp("pipetrain-sgd")
    for name, text in files_in(DOCUMENT).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def wheel(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    subprocess.run([*command, str(package)], check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def scratch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the package installed."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    return environment
