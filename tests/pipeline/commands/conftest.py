"""A recipe of the fake stages, and runs that have finished or have failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.pipeline.conftest import TinyRun
from tests.support.pipe import Pipe

RECIPE = """\
name: good
env: [PIPE_SECRET]
stages:
  model: {use: model.fake}
  data:
    use: data.text
    files: [./a.txt]
    length: 4
    note: ${oc.env:PIPE_SECRET}
  optimizer: {use: optimizer.adam, lr: 1e-4}
  wrap: {use: wrap.red, offload: {device: cpu}}
  train: {use: train.lm, steps: "${stages.data.length}"}
"""


@pytest.fixture
def good(pipe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return `pipe` with the fake stages, in a folder with the recipe `r.yaml`."""
    monkeypatch.setenv("PIPE_SECRET", "hunter2")
    Path("r.yaml").write_text(RECIPE, encoding="utf-8")
    return pipe


@pytest.fixture
def finished(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """Return the finished run `runs/tiny`, to whose project the test moves."""
    monkeypatch.chdir(tiny_run.pipe.folder)
    return tiny_run


@pytest.fixture(scope="session")
def failed(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose rank 1 has failed."""
    pipe = Pipe(plugin, tmp_path_factory.mktemp("failed"))
    assert pipe.run(pipe.recipe(procs=2, train={"fault": "raise", "rank": 1})).code == 1
    return pipe.run_dir
