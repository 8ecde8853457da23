"""Facts of ranks that must be the same."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.chain.plan import plan_file
from pipeline.distributed.agreement import Place, _differences, in_one
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.execution.runner import require_same_recipe
from pipeline.testing import context
from tests.support.processes import run_ranks
from tests.support.runs import TINY

HERE = [Place(0, "a")] * 4
FOUR = [Place(0, "a"), Place(0, "a"), Place(1, "b"), Place(1, "b")]


def told(facts: list[dict[str, Any]], places: list[Place] = FOUR) -> str:
    return in_one(list(_differences(facts, places)))


def test_what_differs_is_named_with_its_ranks_and_nodes() -> None:
    digest = "d" * 64
    facts = [{"lr": 0.003, "model": digest}] * 2 + [{"lr": 0.3, "model": digest}] * 2
    assert told(facts) == (
        "lr is 0.003 on ranks 0 to 1 (node 0, a), 0.3 on ranks 2 to 3 (node 1, b)"
    )
    assert told(facts, HERE) == "lr is 0.003 on ranks 0 to 1, 0.3 on ranks 2 to 3"
    facts[1] = {"model": "e" * 64}
    assert told(facts) == (
        "lr is 0.003 on rank 0 (node 0, a), None on rank 1 (node 0, a), 0.3 on ranks 2 to 3 "
        "(node 1, b); model is dddddddddddd on ranks 0, 2 to 3 (node 0, a; node 1, b), "
        "eeeeeeeeeeee on rank 1 (node 0, a)"
    )


def test_many_differences_are_counted() -> None:
    facts = [{str(number): rank for number in range(9)} for rank in range(2)]
    assert told(facts, HERE[:2]).endswith("3 is 0 on rank 0, 1 on rank 1; and 5 more")


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=4))
def test_a_sentence_for_each_fact_that_differs(facts: list[dict[str, int]]) -> None:
    differ = {name for name in "abc" if len({each.get(name) for each in facts}) > 1}
    assert {text[0] for text in _differences(facts, HERE)} == differ


def _refused(dist: DistContext, facts: list[dict[str, Any]]) -> str:
    try:
        dist.require_same("model", facts[dist.rank])
    except StageError as error:
        return str(error)
    return ""


def test_every_rank_is_told_the_same() -> None:
    found = run_ranks(_refused, 3, [{"weights": 1}, {"weights": 1}, {"weights": 2}])
    assert len(set(found)) == 1
    assert found[0].startswith("the ranks of this run do not have the same model: weights is 1 on")
    assert run_ranks(_refused, 2, [{"weights": 1}] * 2) == ["", ""]


def _recipe(folder: Path, lr: float, path: str) -> Path:
    stages = {
        "model": {"use": "model.hf", "config": {**TINY, "vocab_size": 32}},
        "precision": {"use": "precision.policy"},
        "data": {"use": "data.text", "files": path},
        "optimizer": {"use": "optimizer.adamw", "lr": lr},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 2},
    }
    folder.mkdir(parents=True)
    (folder / "rows.txt").write_text("rain")
    (folder / "recipe.yaml").write_text(json.dumps({"name": "run", "stages": stages}))
    return folder / "recipe.yaml"


def _own_recipe(dist: DistContext, folder: str, rates: list[float]) -> list[str]:
    """Compare recipes in a folder of each rank's own, with data there; the refusal or the log."""
    own = Path(folder) / str(dist.rank)
    plan = plan_file(_recipe(own, rates[dist.rank], str(own / "rows.txt")), skip_checks=True)
    said: list[str] = []
    log = logging.getLogger("ranks")
    log.addFilter(lambda record: said.append(record.getMessage()) is not None)
    ctx = dataclasses.replace(context(own, dist=dist), log=log)
    try:
        require_same_recipe(plan, ctx)
    except StageError as error:
        return [str(error)]
    return said


def test_an_older_recipe_in_a_folder_of_one_machine(tmp_path: Path) -> None:
    first, second = run_ranks(_own_recipe, 2, str(tmp_path), [0.003, 0.3])
    assert first == second
    assert "optimizer.lr is 0.003 on rank 0, 0.3 on rank 1 (give every machine" in first[0]


def test_paths_may_differ_and_that_is_logged(tmp_path: Path) -> None:
    first, second = run_ranks(_own_recipe, 2, str(tmp_path), [0.003, 0.003])
    assert first == second
    assert f"data.files is {tmp_path}/0/rows.txt on rank 0, {tmp_path}/1/rows.txt on" in first[0]


def test_one_process_agrees_with_itself() -> None:
    DistContext(device=None).require_same("x", {"y": object()})  # type: ignore[arg-type]
