"""Recipes of ranks that must be the same."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

from pipeline.chain.plan import plan_file
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.execution.run_spec import steps_of
from pipeline.execution.runner import require_same_recipe
from pipeline.testing import context
from tests.support.processes import run_ranks
from tests.support.runs import TINY


def _recipe(folder: Path, lr: float) -> Path:
    stages = {
        "model": {"use": "model.hf", "config": {**TINY, "vocab_size": 32}},
        "precision": {"use": "precision.policy"},
        "data": {"use": "data.text", "files": f"{folder}/rows.txt"},
        "optimizer": {"use": "optimizer.adamw", "lr": lr},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 2},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.txt").write_text("rain")
    (folder / "recipe.yaml").write_text(json.dumps({"name": "run", "stages": stages}))
    return folder / "recipe.yaml"


def _own_recipes(dist: DistContext, folder: str, rates: list[list[float]]) -> list[list[str]]:
    """Compare recipes in a folder of each rank's own, with data there: refusals, or the log."""
    own, found = Path(folder) / str(dist.rank), []
    for each in rates:
        plan = plan_file(_recipe(own, each[dist.rank]), skip_checks=True)
        said: list[str] = []
        log = logging.getLogger(f"ranks-{len(found)}")
        log.addFilter(lambda record, to=said: to.append(record.getMessage()) is not None)  # type: ignore[misc]
        try:
            ctx, stages = context(own, dist=dist), plan.recipe.public()["stages"]
            ctx = dataclasses.replace(ctx, log=log)
            require_same_recipe(plan.recipe, stages, steps_of(plan), ctx)
        except StageError as error:
            said = [str(error)]
        found.append(said)
    return found


def test_other_settings_are_refused_and_other_paths_logged(tmp_path: Path) -> None:
    """As of an older recipe in a folder of one machine."""
    first, second = run_ranks(_own_recipes, 2, str(tmp_path), [[0.003, 0.3], [0.003, 0.003]])
    assert first == second
    (refused,), logged = first
    assert "optimizer.lr is 0.003 on rank 0, 0.3 on rank 1 (give every machine" in refused
    assert f"data.files is {tmp_path}/0/rows.txt on rank 0, {tmp_path}/1/rows.txt on" in logged[0]
