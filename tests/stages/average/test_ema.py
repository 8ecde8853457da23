"""The average under every strategy: its numbers, checkpoints, evaluation and export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.training import Progress, TrainedRun
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError
from pipeline.testing import plan_view
from pipeline.testing.conformance import checked
from stages.average.ema import EmaAverage
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.consolidate.stream import ConsolidateStream
from stages.train.causal_lm import TrainCausalLm
from stages.wrap.ddp import Ddp
from tests.support.averages import average_run, begun_run, continued_run
from tests.support.models import context
from tests.support.processes import in_turn, run_ranks
from tests.support.state import Setting, load_run, save_run
from tests.support.strategies import having
from tests.support.tier import spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")


WRAPS = [*spread(list(having("basic")), 3), "zero3 offload"]


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Return a folder for each strategy, and what each rank has told of it."""
    root = tmp_path_factory.mktemp("averaged")
    calls = [(average_run, str(root / wrap), Setting(wrap=wrap)) for wrap in WRAPS]
    told = zip(*run_ranks(in_turn, 2, calls), strict=True)
    return root, dict(zip(WRAPS, map(list, told), strict=True))


@pytest.fixture(scope="module")
def continued(averaged: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return what each rank told that goes on under the same strategy, or under ZeRO-1."""
    root, other = averaged[0], tmp_path_factory.mktemp("continued")
    shutil.copytree(root / "zero3", other, dirs_exist_ok=True)
    calls = [(continued_run, str(root / wrap), Setting(wrap=wrap)) for wrap in WRAPS]
    calls.append((continued_run, str(other), Setting(wrap="zero1")))
    told = zip(*run_ranks(in_turn, 2, calls), strict=True)
    return dict(zip([*WRAPS, "elsewhere"], map(list, told), strict=True))


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_average_of_a_plain_computation_resumed_exactly(
    wrap: str, averaged: Any, continued: Any
) -> None:
    for told in averaged[1][wrap]:
        assert told["begun"]
        assert told["difference"] < 3e-7
        assert told["moved"] > 1e-4
        assert told["put"]
        assert told["seen"] == [True, False]
        assert told["unchanged"]
    averages = {name: value for name, value in told["state"].items() if name.startswith("ema/")}
    assert averages
    assert not any("layers.1." in name for name in averages)  # these are frozen
    for name, value in told["exported"].items():
        kind = "weight" if name in told["frozen"] else "ema"
        if name != "lm_head.weight":  # this one is tied
            assert value == told["state"][f"{kind}/{name}"]
    assert told["exported"]["lm_head.weight"] == told["exported"]["model.embed_tokens.weight"]
    for again in continued[wrap]:
        assert again["state"] == told["state"]
        assert again["after"] == told["after"]


def test_any_strategy_and_world_size_goes_on_with_it(averaged: Any, continued: Any) -> None:
    root, told = averaged[0], averaged[1]["zero3"][0]
    assert continued["elsewhere"][0]["state"] == told["state"]
    for wrap, ranks in (("ddp", 1), ("fsdp full", 3)):
        again = run_ranks(continued_run, ranks, str(root / "zero3"), Setting(wrap=wrap))[0]
        assert again["state"] == told["state"], wrap


def test_it_begins_with_the_weights_of_a_checkpoint_without_one(tmp_path: Path) -> None:
    run_ranks(save_run, 1, str(tmp_path), Setting(wrap="ddp"))
    assert run_ranks(begun_run, 2, str(tmp_path), Setting(wrap="fsdp full")) == [True, True]
    run = TrainedRun(checkpoint=str(tmp_path / "checkpoints/step-00000003"), progress=Progress())
    with pytest.raises(CheckpointError, match="holds no ema of the weights"):
        ConsolidateStream(weights="ema").run(context(tmp_path), run)


def leave(dist: DistContext, folder: str) -> bool:
    """Continue without the average that a checkpoint holds."""
    average_run(dist, folder, Setting(wrap="ddp"))
    state = load_run(dist, folder, Setting(wrap="ddp"))["state"]
    return not any(name.startswith("ema/") for name in state)


def test_a_recipe_without_it_goes_on_too(tmp_path: Path) -> None:
    assert run_ranks(leave, 1, str(tmp_path)) == [True]


def test_mistakes() -> None:
    ema, saving = EmaAverage(), ShardedCheckpoint()
    train = TrainCausalLm(global_batch_size=8, steps=10)
    good = plan_view({"wrap": Ddp(), "ema": ema, "checkpoint": saving, "train": train})
    assert list(ema.check(good)) == []
    late = plan_view({"wrap": Ddp(), "checkpoint": saving, "ema": ema, "train": train})
    assert [problem.hint for problem in ema.check(late)] == [
        "put this slot between wrap and checkpoint"
    ]
    export = ConsolidateStream(weights="ema")
    assert checked(export, good) == []
    told = checked(export, plan_view({"wrap": Ddp(), "checkpoint": saving, "train": train}))
    assert [(problem.key, problem.message) for problem in told] == [
        ("weights", "this recipe's training keeps no average")
    ]
    assert checked(export, plan_view({})) == []  # the checkpoint of another run
