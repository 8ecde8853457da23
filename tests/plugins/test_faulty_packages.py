"""Faulty packages: the messages of `pipe`, and its work with all other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.plugins import install

GOOD = """
    from dataclasses import dataclass

    from pipeline.contracts.stage import Context

    @dataclass(frozen=True, kw_only=True)
    class Nothing:
        '''Do nothing.'''

        def run(self, ctx: Context) -> None: ...
"""


def pipe(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Return a call of `pipe ARGS` where the packages in `folder` are installed."""
    paths = [str(folder), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-m", "pipetrain", *args],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def recipe(folder: Path, use: str) -> None:
    text = f"name: test\nstages:\n  only:\n    use: {use}\n"
    (folder / "r.yaml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "raise RuntimeError('no licence')",
            "cannot be loaded: RuntimeError: no licence (repair or uninstall acme-stages)",
        ),
        (
            "import acme_missing",
            "cannot be loaded: ModuleNotFoundError: No module named 'acme_missing' "
            "(repair or uninstall acme-stages)",
        ),
        ("class Nothing: ...", "(acme:Nothing) is not a dataclass"),
        (GOOD.replace("frozen=True, ", ""), "(acme:Nothing) is not a frozen dataclass"),
    ],
)
def test_a_package_at_fault_is_named(tmp_path: Path, source: str, message: str) -> None:
    install(tmp_path, "acme-stages", "acme", source, {"custom.nothing": "Nothing"})
    recipe(tmp_path, "custom.nothing")
    expected = f"stage `custom.nothing` of acme-stages 1.0 {message}"
    checked = pipe(tmp_path, "check", "r.yaml")
    assert checked.returncode == 2
    assert checked.stderr == f"r.yaml:4:10: only.use: {expected}\n"
    explained = pipe(tmp_path, "stages", "custom.nothing")
    assert (explained.returncode, explained.stderr) == (2, f"error: {expected}\n")


def test_one_name_from_two_packages(tmp_path: Path) -> None:
    install(tmp_path, "acme-stages", "acme", GOOD, {"custom.nothing": "Nothing"})
    install(tmp_path, "other-stages", "other", GOOD, {"custom.nothing": "Nothing"})
    recipe(tmp_path, "custom.nothing")
    checked = pipe(tmp_path, "check", "r.yaml")
    assert checked.returncode == 2
    assert checked.stderr == (
        "r.yaml:4:10: only.use: stage `custom.nothing` is registered by acme-stages 1.0 and "
        "other-stages 1.0 (uninstall one of them)\n"
    )


def test_recipes_without_it_do_not_suffer(tmp_path: Path) -> None:
    install(tmp_path, "acme-stages", "acme", "raise RuntimeError", {"wrap.acme": "Nothing"})
    recipe(tmp_path, "precision.policy")
    checked = pipe(tmp_path, "check", "r.yaml")
    assert (checked.returncode, checked.stderr) == (0, "")
    listed = pipe(tmp_path, "stages")
    assert listed.returncode == 0
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("wrap.acme ")]
    assert "acme-stages 1.0" in line
    assert "cannot be used: stage `wrap.acme` of acme-stages 1.0 cannot be loaded" in line


def test_two_good_packages(tmp_path: Path) -> None:
    install(tmp_path, "acme-stages", "acme", GOOD, {"custom.one": "Nothing"})
    install(tmp_path, "other-stages", "other", GOOD, {"custom.two": "Nothing"})
    recipe(tmp_path, "custom.two")
    assert pipe(tmp_path, "check", "r.yaml").stdout == "ok: test: 1 stage: custom.two\n"
