"""`pipe new-stage`: the packages that it writes are built, installed, tested and used as they
are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.scaffold.package import NewStage
from tests.support.tier import spread
from tests.support.tiny_project import tiny_project


def new_stage(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new-stage", *arguments])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def python(*arguments: str, installed: Path) -> subprocess.CompletedProcess[str]:
    """Run this Python with a folder of packages."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(installed)!r});"
        "runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", spread(["optimizer.my_own", "track.my_own", "report.my_own"], 1))
def test_its_own_tests_pass(name: str, tmp_path: Path) -> None:
    written = new_stage(name)
    package = f"pipetrain-{name.replace('.', '-').replace('_', '-')}"
    module = package.replace("-", "_")
    assert written.exit_code == 0, written.stderr
    assert written.stdout.splitlines() == [
        f"{package}/{file}"
        for file in ("pyproject.toml", "README.md", f"{module}.py", f"tests/test_{module}.py")
    ]
    assert written.stderr == f"next: pip install -e '{package}[dev]' && pipe stages {name}\n"
    installed = tmp_path / "installed"
    install = ["install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", *install, str(installed), f"./{package}"],
        check=True, capture_output=True,
    )  # fmt: skip
    own = python("pytest", "-q", "-p", "no:cacheprovider", package, installed=installed)
    assert own.returncode == 0, own.stdout
    assert "2 passed" in own.stdout


def test_recipes_can_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed package, in this process: module and metadata on the path."""
    from tests.support.plugins import install

    for name, kind in (("optimizer.fresh", "OptimizerFresh"), ("track.fresh", "TrackFresh")):
        new = NewStage(name)
        source = dict(new.files())[f"{new.module}.py"]
        (tmp_path / "installed").mkdir(exist_ok=True)
        assert new.stage == kind
        install(tmp_path / "installed", new.package, new.module, source, {name: new.stage})
    monkeypatch.syspath_prepend(tmp_path / "installed")
    shown = CliRunner().invoke(main, ["stages", "optimizer.fresh"])
    assert shown.exit_code == 0, shown.stderr
    first, _, summary = shown.stdout.splitlines()[:3]
    assert first == "optimizer.fresh (pipetrain-optimizer-fresh 1.0)"
    assert summary.startswith("Declare SGD with momentum")
    recipe = tiny_project(tmp_path, track={"use": "track.fresh", "file": "./lines.jsonl"})
    overrides = ["optimizer.use=optimizer.fresh", "optimizer.lr=0.1"]
    checked = CliRunner().invoke(main, ["check", str(recipe), *overrides])
    assert checked.exit_code == 0, checked.stderr
    assert " -> optimizer.fresh -> " in checked.stdout
    wrong = CliRunner().invoke(main, ["check", str(recipe), *overrides, "optimizer.momentum=2"])
    assert wrong.exit_code == 2
    assert "optimizer.momentum: " in wrong.stderr


NO_NAME = "is no name of a stage (a kind, a dot and a word, as in optimizer.sgd)"
TAKEN = "taken is there already (name another folder with --to)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sgd"], f"`sgd` {NO_NAME}"),
        (["Optimizer.Sgd"], f"`Optimizer.Sgd` {NO_NAME}"),
        (["optimizer.sgd_"], f"`optimizer.sgd_` {NO_NAME}"),
        (["optimizer.adamw"], "a stage called optimizer.adamw is installed already"),
        (["optimizer.sgd", "--to", "taken"], TAKEN),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    refused = new_stage(*arguments)
    assert (refused.exit_code, refused.stdout, refused.stderr) == (2, "", f"error: {message}\n")
    assert list(tmp_path.rglob("*")) == [tmp_path / "taken"]


@given(st.from_regex(r"[a-z_0-9]{1,8}\.[a-z_0-9]{1,8}", fullmatch=True))
def test_names_are_good_for_packages_and_classes(name: str) -> None:
    """Each name is refused, or makes a distribution's, a module's and a class's."""
    from packaging.requirements import Requirement

    try:
        new = NewStage(name)
    except UsageError:
        return
    assert Requirement(new.package).name == new.package
    assert new.module.isidentifier()
    assert new.stage.isidentifier()
