"""transformers' Trainer as a stage against the plain loop.

Tolerances are those of the strategies: the samples, the loss's normalisation, the learning rates
and the clipping are the recipe's, so that only the order of summation differs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from stages.consolidate.stream import ConsolidateStream
from stages.hf.trainer import HfTrainer
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import BATCH, SEED, STEPS, tiny_source
from tests.parity.combinations import LORA
from tests.parity.reference import CLIP, DECAY, LR, WARMUP, reference
from tests.parity.test_parity import plain_loop
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context, toy_data


def trained(
    dist: DistContext,
    folder: str,
    fields: dict[str, Any],
    compute: str,
    lora: Any = None,
    frozen: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Train with the stage; write the weights to `folder`/final.safetensors."""
    ctx = context(dist, folder, SEED)
    finals: list[Any] = []
    ctx.on_exit = finals.append
    plan = AdamW(lr=LR, weight_decay=DECAY, warmup_steps=WARMUP, max_grad_norm=CLIP).run(ctx)
    precision = PrecisionPolicy(compute=compute).run(ctx)
    stage = HfTrainer(global_batch_size=BATCH, steps=STEPS, **fields)
    run = stage.run(ctx, toy_data(), plan, precision, tiny_source(ctx, lora, {"frozen": frozen}))
    if dist.is_main:
        save_file(dict(ConsolidateStream().run(ctx, run)), f"{folder}/final.safetensors")
    for call in reversed(finals):
        call()
    dist.barrier()
    return {
        "records": list(records(Path(folder) / "metrics.jsonl")),
        "progress": vars(run.progress),
        "checkpoint": run.checkpoint,
    }


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        pytest.param(1, {"micro_batch_size": 2, "eval_every": 3}, id="on 1"),
        pytest.param(2, {"micro_batch_size": 2}, id="on 2"),
        pytest.param(2, {"micro_batch_size": 3}, id="uneven on 2"),
    ],
)
def test_the_trainer_gives_the_numbers_of_a_plain_loop(
    ranks: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    losses, norms, weights, heldout = plain_loop()
    result = run_ranks(trained, ranks, str(tmp_path), fields, "fp32")[0]
    steps = [record for record in result["records"] if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-4)
    assert result["progress"]["metrics"]["eval_loss"] == pytest.approx(heldout, rel=1e-5)
    assert result["progress"]["samples"] == STEPS * BATCH
    final = load_file(tmp_path / "final.safetensors")
    assert weights.keys() <= final.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=1e-4, msg=name)


def test_bf16_is_the_policy_and_no_autocast(tmp_path: Path) -> None:
    losses, norms, _, _ = plain_loop(torch.bfloat16)
    result = run_ranks(trained, 2, str(tmp_path), {"micro_batch_size": 2}, "bf16")[0]
    steps = [record for record in result["records"] if "loss" in record]
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=3e-4)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=3e-3)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_an_adapter_is_trained_and_saved_alone(quantize: str | None, tmp_path: Path) -> None:
    lora = {**LORA, "quantize": quantize}
    source = tiny_source(
        context(DistContext(device=torch.device("cpu")), str(tmp_path), SEED), lora
    )
    expected, norms, weights, _ = reference(
        source.inference_view, toy_data(), seed=SEED, steps=STEPS, batch=BATCH
    )
    result = run_ranks(trained, 2, str(tmp_path), {"micro_batch_size": 2}, "fp32", lora)[0]
    assert losses(result) == pytest.approx(expected, rel=1e-5)
    steps = [record for record in result["records"] if "loss" in record]
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-4)
    final = load_file(tmp_path / "final.safetensors")
    assert set(final) == set(source.trained)
    for name in final:
        torch.testing.assert_close(final[name], weights[name], rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("lora", [None, {**LORA, "quantize": "nf4"}])
def test_a_resumed_training_ends_the_same(lora: Any, tmp_path: Path) -> None:
    fields = {"micro_batch_size": 3, "save_every": 2, "keep": None}
    whole = run_ranks(trained, 2, str(tmp_path), fields, "fp32", lora)[0]
    final = (tmp_path / "final.safetensors").read_bytes()
    checkpoints = tmp_path / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {
        "checkpoint-2", "checkpoint-4", "checkpoint-6",
    }  # fmt: skip
    assert Path(whole["checkpoint"]).name == "checkpoint-6"
    shutil.rmtree(checkpoints / "checkpoint-2")
    (checkpoints / "checkpoint-6" / "progress.json").unlink()  # like a kill during the save
    again = run_ranks(trained, 2, str(tmp_path), fields, "fp32", lora)[0]
    assert again["progress"] == whole["progress"]
    assert (tmp_path / "final.safetensors").read_bytes() == final
    assert losses(again) == losses(whole)


def test_frozen_weights_come_from_the_source_again(tmp_path: Path) -> None:
    frozen = ("model.embed_tokens.*", "model.layers.0.*")
    source = tiny_source(
        context(DistContext(device=torch.device("cpu")), str(tmp_path), SEED),
        fields={"frozen": frozen},
    )
    expected, _, weights, _ = reference(source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH)
    fields = {"micro_batch_size": 2, "save_every": 4, "keep": None}
    whole = run_ranks(trained, 2, str(tmp_path), fields, "fp32", None, frozen)[0]
    assert losses(whole) == pytest.approx(expected, rel=1e-5)
    final = (tmp_path / "final.safetensors").read_bytes()
    held = load_file(tmp_path / "final.safetensors")
    assert held.keys() == weights.keys() - set(source.frozen_base)
    for name in held:
        torch.testing.assert_close(held[name], weights[name], rtol=0, atol=1e-4, msg=name)
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-6")
    for other in ((), ("model.layers.1.*",)):
        with pytest.raises(RankFailed, match="checkpoint-4: other weights were frozen than now"):
            run_ranks(trained, 2, str(tmp_path), fields, "fp32", None, other)
    again = run_ranks(trained, 2, str(tmp_path), fields, "fp32", None, frozen)[0]
    assert losses(again) == losses(whole)
    assert (tmp_path / "final.safetensors").read_bytes() == final


def test_a_training_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    expected, _, weights, _ = plain_loop()
    fields = {"micro_batch_size": 3, "save_every": 4, "keep": None}
    run_ranks(trained, 2, str(tmp_path), fields, "fp32")
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-6")
    again = run_ranks(trained, 1, str(tmp_path), fields, "fp32")[0]
    assert losses(again) == pytest.approx(expected, rel=1e-5)
    final = load_file(tmp_path / "final.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=1e-4, msg=name)


def losses(result: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in result["records"] if "loss" in record]
