"""Settings of the checkpoint stages: their effects on a training, and mistakes that are found
before a process starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from pipeline.testing import plan_view
from stages.checkpoint.sharded import FullCheckpoint, ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, hashed, load_run, make_engine, save_run, source

PLAN = plan_view({})


def train_keeping_the_best(dist: DistContext, folder: str) -> list[dict[str, Any]]:
    """Train 12 steps that soon overshoot, evaluating every 3 and saving every 2."""
    ctx, setting = context(dist, folder), Setting(wrap="ddp")
    plan = AdamW(lr=0.05, schedule="constant", warmup_steps=0).run(ctx)
    engine = make_engine(ctx, setting, plan)
    checkpoints = ShardedCheckpoint(every=2, keep=1, keep_best=1).run(ctx, engine)
    loop = TrainCausalLm(global_batch_size=4, steps=12, eval_every=3)
    loop.run(ctx, engine, toy_data(), plan, checkpoints, source(ctx, setting))
    checkpoints.close()
    engine.close()
    return list(records(ctx.run_dir / "metrics.jsonl"))


def test_the_best_by_heldout_loss_is_kept(tmp_path: Path) -> None:
    lines = run_ranks(train_keeping_the_best, 1, str(tmp_path))[0]
    heldout = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert sorted(heldout) == [3, 6, 9, 12]
    assert min(heldout, key=lambda step: heldout[step]) == 3  # between the steps of `every`
    assert [line["best_step"] for line in lines if "eval_loss" in line] == [3, 3, 3, 3]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000012"]


def test_a_run_can_start_from_another_runs_newest(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    saved = run_ranks(save_run, 1, str(old), Setting(wrap="ddp"))[0]
    (old / "recipe.yaml").write_text("name: old\n")
    begin = Setting(wrap="ddp", checkpoint={"start_from": str(old)})
    loaded = run_ranks(load_run, 2, str(new), begin)
    assert [told["state"] for told in loaded] == [saved, saved]
    nowhere = Setting(wrap="ddp", checkpoint={"start_from": str(new)})
    with pytest.raises(RankFailed, match=r"start_from: .*new.* holds no checkpoint"):
        run_ranks(load_run, 1, str(tmp_path / "third"), nowhere)


def test_fewer_bits_are_loaded_only_when_that_is_accepted(tmp_path: Path) -> None:
    run_ranks(save_run, 1, str(tmp_path), Setting(wrap="ddp", full=True, compute="bf16"))
    narrow = Setting(wrap="ddp", full=True, compute="bf16", master="bf16")
    with pytest.raises(RankFailed, match=r"is fp32, this recipe trains bf16.*--accept precision"):
        run_ranks(load_run, 1, str(tmp_path), narrow)
    loaded = run_ranks(load_run, 1, str(tmp_path), narrow, "precision")[0]["state"]
    saved = load_file(tmp_path / "checkpoints/step-00000003/model.safetensors")
    assert saved["model.norm.weight"].dtype == torch.float32
    for name, weight in saved.items():
        assert loaded[f"weight/{name}"] == hashed(weight.bfloat16())


@pytest.fixture
def no_google(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gcsfs" else find(name)
    )


@pytest.mark.usefixtures("no_google")
@pytest.mark.parametrize("key", ["folder", "start_from"])
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("foo://x/y", "foo:// is not opened"),
        ("gs://bucket/x", "gs:// needs a package"),
        ("memory://x", None),
        (str(Path(__file__).parent), None),
        (None, None),
    ],
)
def test_addresses(key: str, address: str | None, told: str | None) -> None:
    (*found,) = ShardedCheckpoint(**{key: address}).check(PLAN)
    assert [(problem.key, problem.message) for problem in found] == ([(key, told)] if told else [])
    assert all(problem.hint for problem in found)


@pytest.mark.parametrize("start", ["runs/gone", "~nobody.of.this.name/run", "x" * 300])
def test_a_start_that_is_not_there_is_a_warning(start: str) -> None:
    """A run that has checkpoints of its own does not need it any more."""
    (problem,) = ShardedCheckpoint(start_from=start).check(PLAN)
    assert (problem.key, problem.warning) == ("start_from", True)
    assert problem.message == f"{start} does not exist here, and a new run needs it"


def test_a_folder_of_nobody() -> None:
    (problem,) = ShardedCheckpoint(folder="~nobody.of.this.name/x").check(PLAN)
    assert (problem.key, problem.warning) == ("folder", False)
    assert problem.message.startswith("~nobody.of.this.name/x: no such user here")


def test_the_full_checkpoint_starts_from_the_same() -> None:
    (problem,) = FullCheckpoint(start_from="foo://x").check(PLAN)
    assert (problem.key, problem.message) == ("start_from", "foo:// is not opened")


@pytest.mark.parametrize("folder", ["s3://bucket/x", "s3:/bucket/x", "foo://x"])
def test_the_full_checkpoint_takes_a_path(folder: str) -> None:
    (problem,) = FullCheckpoint(folder=folder).check(PLAN)
    found = (problem.key, problem.message, problem.hint)
    assert found == ("folder", f"{folder} is an address, not a path", "use checkpoint.sharded")
