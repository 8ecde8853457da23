"""transformers' Trainer as a stage against the plain loop.

Tolerances are those of the strategies: the samples, the loss's normalisation, the learning rates
and the clipping are the recipe's, so that only the order of summation differs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from stages.consolidate.stream import ConsolidateStream
from stages.hf.trainer import HfTrainer
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import ADAMW, BATCH, SEED, STEPS, Case, source_of
from tests.parity.combinations import LORA
from tests.parity.reference import assert_same_numbers, assert_same_weights, plain_loop, steps_of
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context, toy_data

QLORA = {**LORA, "quantize": "nf4"}
FROZEN = Case(hf={"frozen": ("model.embed_tokens.*", "model.layers.0.*")})


def train(dist: DistContext, folder: str, fields: dict[str, Any], case: Case) -> dict[str, Any]:
    """Train with the stage; write the weights to `folder`/final.safetensors."""
    ctx = context(dist, folder, SEED)
    finals: list[Any] = []
    ctx.on_exit = finals.append
    precision = PrecisionPolicy(compute=case.compute).run(ctx)
    stage = HfTrainer(global_batch_size=BATCH, steps=STEPS, **fields)
    run = stage.run(ctx, toy_data(), ADAMW.run(ctx), precision, source_of(ctx, case))
    if dist.is_main:
        save_file(dict(ConsolidateStream().run(ctx, run)), f"{folder}/final.safetensors")
    for call in reversed(finals):
        call()
    dist.barrier()
    return {
        "records": list(records(Path(folder) / "metrics.jsonl")),
        "progress": vars(run.progress),
        "eval_loss": run.progress.metrics.get("eval_loss"),
        "checkpoint": run.checkpoint,
        "folder": folder,
    }


def run(folder: Path, case: Case, ranks: int = 2, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(train, ranks, str(folder), fields, case)[0]
    return found


def test_one_process_evaluates_too(tmp_path: Path) -> None:
    assert_same_numbers(
        run(tmp_path, Case(), 1, micro_batch_size=2, eval_every=3), plain_loop(Case())
    )


def test_bf16_is_the_policy_and_no_autocast(tmp_path: Path) -> None:
    case = Case(compute="bf16")
    losses, norms, _, _ = plain_loop(case)
    result = run(tmp_path, case, micro_batch_size=2)
    assert steps_of(result, "loss") == pytest.approx(losses, rel=3e-4)
    assert steps_of(result, "grad_norm") == pytest.approx(norms, rel=3e-3)


@pytest.mark.parametrize(
    "lora", [None, pytest.param(LORA, marks=pytest.mark.full), QLORA], ids=["whole", "lora", "nf4"]
)
def test_a_resumed_training_ends_the_same(lora: Any, tmp_path: Path) -> None:
    """An adapter is trained and saved without its base."""
    case, fields = Case(lora=lora), {"micro_batch_size": 3, "save_every": 2, "keep": None}
    whole, expected = run(tmp_path / "run", case, **fields), plain_loop(case)
    assert_same_numbers(whole, expected)
    assert whole["progress"]["samples"] == STEPS * BATCH
    if lora:
        assert load_file(tmp_path / "run/final.safetensors").keys() == expected[2].keys()
    final = (tmp_path / "run/final.safetensors").read_bytes()
    checkpoints = tmp_path / "run/checkpoints"
    names = {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert {path.name for path in checkpoints.iterdir()} == names
    assert Path(whole["checkpoint"]).name == "checkpoint-6"
    shutil.rmtree(checkpoints / "checkpoint-2")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (checkpoints / "checkpoint-6" / "progress.json").unlink()  # like a kill during the save
    again = run(tmp_path / "run", case, **fields)
    assert again["progress"] == whole["progress"]
    assert (tmp_path / "run/final.safetensors").read_bytes() == final
    assert steps_of(again, "loss") == steps_of(whole, "loss")
    if lora is None:  # the same on another number of processes
        shutil.rmtree(tmp_path / "other/checkpoints/checkpoint-6")
        other = run(tmp_path / "other", case, 1, **fields)
        assert steps_of(other, "loss") == pytest.approx(expected[0], rel=1e-5)
        assert_same_weights(tmp_path / "other", expected[2])


def test_frozen_weights_come_from_the_source_again(tmp_path: Path) -> None:
    expected = plain_loop(FROZEN)
    fields = {"micro_batch_size": 2, "save_every": 4, "keep": None}
    whole = run(tmp_path, FROZEN, **fields)
    assert_same_numbers(whole, expected)
    final = (tmp_path / "final.safetensors").read_bytes()
    assert load_file(tmp_path / "final.safetensors").keys() == expected[2].keys()
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-6")
    for other in (Case(), Case(hf={"frozen": ("model.layers.1.*",)})):
        with pytest.raises(RankFailed, match="checkpoint-4: other weights were frozen than now"):
            run(tmp_path, other, **fields)
    again = run(tmp_path, FROZEN, **fields)
    assert steps_of(again, "loss") == steps_of(whole, "loss")
    assert (tmp_path / "final.safetensors").read_bytes() == final
