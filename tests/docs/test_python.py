"""Every block of docs/python.md, run one after the other as in a notebook."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT, blocks
from tests.support.pipe import ForkedPopen
from tests.support.tier import FULL
from tests.support.tiny_project import tiny_project

BLOCKS = [block.text for block in blocks(ROOT / "docs/python.md", "python")]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the variables after the last block."""
    folder = tmp_path_factory.mktemp("notebook")
    recipe = yaml.safe_load(tiny_project(folder).read_text())
    recipe["launch"]["procs"] = 1
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("MPLBACKEND", "agg")
        if not FULL:
            pipes = {"PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}
            patched.setattr("pipeline.api.subprocess", SimpleNamespace(Popen=ForkedPopen, **pipes))
        for number, text in enumerate(BLOCKS, 1):
            exec(compile(text, f"block {number} of python.md", "exec"), found)
    return found


def test_a_run_has_what_the_page_says(notebook: dict[str, Any]) -> None:
    outcome = notebook["outcome"]
    assert outcome.export == outcome.folder / "export"
    assert [one["step"] for one in notebook["steps"]] == list(range(1, 9))
    problem = notebook["problem"]
    assert (problem.key, problem.hint) == ("train.stpes", "did you mean `steps`?")
    assert notebook["needs"].fits


def test_a_sweep_finds_the_best_and_exports_it(notebook: dict[str, Any]) -> None:
    losses, best, table = (notebook[name] for name in ("losses", "best", "table"))
    assert set(losses) == {(rate, seed) for rate in (0.001, 0.01) for seed in (0, 1)}
    assert best[0] == 0.01
    assert notebook["chosen"].history().best["eval_loss"] == losses[best]
    assert table["eval_loss"].tolist() == sorted(losses.values())
    assert table["lr"].iloc[0] == best[0]
    exported = [key for key, one in notebook["trained"].items() if one.export is not None]
    assert exported == [best]
    assert (notebook["chosen"].export / "config.json").is_file()


def test_metrics_are_a_table(notebook: dict[str, Any]) -> None:
    metrics = notebook["metrics"]
    assert metrics.index.tolist() == list(range(1, 9))
    assert metrics["loss"].iloc[-1] < metrics["loss"].iloc[0]
    assert list(notebook["curve"]) == list(range(1, 9))


def test_the_page_is_short() -> None:
    assert len((ROOT / "docs/python.md").read_text("utf-8").split()) <= 800
