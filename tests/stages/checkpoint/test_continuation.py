"""An interrupted training goes on as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.artifacts import LossScaling
from pipeline.dist import Dist
from pipeline.metrics import records
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.consolidate.sharded import ConsolidateSharded
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, make_engine, source
from tests.support.zero import has_libaio

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

HALF, WHOLE, BATCH = 10, 20, 6
NUMBERS = ("step", "loss", "grad_norm", "tokens", "samples", "eval_loss", "loss_scale")
DROPOUT = {"attention_dropout": 0.1}
FP16 = {"compute": "fp16", "loss_scaling": LossScaling(initial_scale=1024.0, growth_interval=4)}


def train(
    dist: Dist, folder: str, setting: Setting, micro: int, checkpoint: dict[str, Any]
) -> list[dict[str, Any]]:
    """Train to step 20, saving every 10, from wherever the folder's newest checkpoint is.

    40 samples are an epoch, so step 10 is in the middle of the second.
    """
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5).run(ctx)
    engine = make_engine(ctx, setting)
    checkpoints = ShardedCheckpoint(every=HALF, keep=None, **checkpoint).run(ctx, engine)
    loop = TrainCausalLm(
        global_batch_size=BATCH, steps=WHOLE, micro_batch_size=micro, log_every=5, eval_every=7
    )
    trained = loop.run(ctx, engine, toy_data(), plan, checkpoints, source(ctx, setting))
    checkpoints.close()
    engine.close()
    if dist.is_main:
        save_file(dict(ConsolidateSharded().run(ctx, trained)), f"{folder}/final.safetensors")
    return list(records(ctx.run_dir / "metrics.jsonl"))


def numbers(lines: list[dict[str, Any]]) -> list[list[Any]]:
    return [[line.get(name) for name in NUMBERS] for line in lines]


def stopped_at_half(whole: Path, to: Path) -> None:
    """What a run leaves that was stopped right after step 10 was saved, or some steps later."""
    (to / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints/step-00000010", to / "checkpoints/step-00000010")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (to / "metrics.jsonl").write_text("".join(lines[:15]) + lines[15][:20])


CASES = {
    "ddp fp32": (Setting(wrap="ddp", frozen="", model=DROPOUT), 2),
    "ddp of three fp32": (Setting(wrap="ddp", model=DROPOUT), 3),
    "ddp fp16": (Setting(wrap="ddp", model=DROPOUT, **FP16), 2),
    "fsdp full bf16": (Setting(wrap="fsdp full", model=DROPOUT, compute="bf16"), 3),
    "fsdp hybrid": (Setting(wrap="fsdp hybrid", model=DROPOUT), 4),
    "fsdp offload bf16": (Setting(wrap="fsdp offload", model=DROPOUT, compute="bf16"), 2),
    "zero1 bf16": (Setting(wrap="zero1", model=DROPOUT, compute="bf16"), 2),
    "zero2 fp32": (Setting(wrap="zero2", model=DROPOUT), 3),
    "zero2 offload bf16": (Setting(wrap="zero2 offload", model=DROPOUT, compute="bf16"), 2),
    "zero3 bf16": (Setting(wrap="zero3", model=DROPOUT, compute="bf16"), 2),
    "zero3 offload fp32": (Setting(wrap="zero3 offload", model=DROPOUT), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_resumed_equals_undisturbed_bit_for_bit(name: str, tmp_path: Path) -> None:
    setting, ranks = CASES[name]
    through = run_ranks(train, ranks, str(tmp_path / "whole"), setting, 2, {})[0]
    require_same_after_resume(tmp_path, setting, ranks, through)


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_resumed_equals_undisturbed_with_state_on_disk(tmp_path: Path) -> None:
    big = {"vocab_size": 6001, "hidden_size": 96, "num_attention_heads": 4}
    setting = Setting(
        wrap="zero3 nvme", nvme=str(tmp_path / "nvme"), compute="bf16", model={**DROPOUT, **big}
    )
    through = run_ranks(train, 2, str(tmp_path / "whole"), setting, 2, {})[0]
    require_same_after_resume(tmp_path, setting, 2, through)


def require_same_after_resume(
    tmp_path: Path, setting: Setting, ranks: int, through: list[dict[str, Any]]
) -> None:
    stopped_at_half(tmp_path / "whole", tmp_path / "parts")
    asked = {"asynchronous": False}
    resumed = run_ranks(train, ranks, str(tmp_path / "parts"), setting, 2, asked)[0]
    assert [line["step"] for line in through if "loss" in line] == list(range(1, WHOLE + 1))
    assert numbers(resumed) == numbers(through)
    left = load_file(tmp_path / "whole/final.safetensors")
    right = load_file(tmp_path / "parts/final.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_other_strategies_and_world_sizes_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    """Same global batches whatever the ranks and micro-batches; only rounding differs."""
    through = run_ranks(train, 2, str(tmp_path / "whole"), Setting(wrap="ddp"), 2, {})[0]
    for wrap, ranks, micro in (("fsdp full", 3, 1), ("zero3", 1, 6), ("zero2 offload", 2, 2)):
        folder = tmp_path / wrap
        stopped_at_half(tmp_path / "whole", folder)
        resumed = run_ranks(train, ranks, str(folder), Setting(wrap=wrap), micro, {})[0]
        losses = [line["loss"] for line in resumed if "loss" in line]
        assert losses == pytest.approx([r["loss"] for r in through if "loss" in r], rel=1e-5)
        for name in ("step", "samples", "tokens"):
            assert [line.get(name) for line in resumed] == [line.get(name) for line in through]
        final = load_file(folder / "final.safetensors")
        for key, weight in load_file(tmp_path / "whole/final.safetensors").items():
            torch.testing.assert_close(final[key], weight, rtol=0, atol=1e-4, msg=key)
