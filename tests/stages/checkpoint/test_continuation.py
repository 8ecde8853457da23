"""An interrupted training continues as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.contracts.metrics import kind_of, records
from pipeline.contracts.precision import LossScaling
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.consolidate.stream import ConsolidateStream
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import WRAPS, Setting, make_engine, source
from tests.support.strategies import STRATEGIES
from tests.support.tier import FULL
from tests.support.zero import has_libaio

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

HALF, WHOLE, BATCH = 8, 12, 6
NUMBERS = ("step", "loss", "grad_norm", "tokens", "samples", "eval_loss", "loss_scale")
DROPOUT = {"attention_dropout": 0.1}


def train(
    dist: DistContext, folder: str, setting: Setting, micro: int, checkpoint: dict[str, Any]
) -> list[dict[str, Any]]:
    """Train to the last step from the folder's newest checkpoint, saving half way. 40 samples are
    an epoch, so step 8 is in the second one."""
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5).run(ctx)
    engine = make_engine(ctx, setting)
    checkpoints = ShardedCheckpoint(every=HALF, keep=None, **checkpoint).run(ctx, engine)
    loop = TrainCausalLm(
        global_batch_size=BATCH, steps=WHOLE, micro_batch_size=micro, log_every=3, eval_every=5
    )
    trained = loop.run(ctx, engine, toy_data(), plan, checkpoints, source(ctx, setting))
    checkpoints.close()
    engine.close()
    if dist.is_main:
        save_file(dict(ConsolidateStream().run(ctx, trained)), f"{folder}/final.safetensors")
    found = records(ctx.run_dir / "metrics.jsonl")
    return [record for record in found if kind_of(record) != "checkpoint written"]


def train_each(
    dist: DistContext, to: str, runs: list[tuple[str, Setting]], checkpoint: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    return [train(dist, f"{folder}/{to}", setting, 2, checkpoint) for folder, setting in runs]


def numbers(lines: list[dict[str, Any]]) -> list[list[Any]]:
    return [[line.get(name) for name in NUMBERS] for line in lines]


def stopped_at_half(whole: Path, to: Path) -> None:
    """Leave the files of a run that saved step 8 and was stopped while it recorded a later one."""
    (to / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints/step-00000008", to / "checkpoints/step-00000008")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if kind_of(json.loads(line)) != "checkpoint written"]
    (to / "metrics.jsonl").write_text("".join(lines[:11]) + lines[11][:20])


DTYPES: dict[str, dict[str, Any]] = {"fp32": {"compute": "fp32"}, "bf16": {"compute": "bf16"}}
BOTH = DTYPES if FULL else {"bf16": DTYPES["bf16"]}
"""Dtypes. bf16 has all the state of fp32, and masters beside the weights."""
FP16 = {"compute": "fp16", "loss_scaling": LossScaling(initial_scale=256.0, growth_interval=3)}
RANKS = {"ddp": 2, "fsdp hybrid": 4, "fsdp full": 3, "zero2": 3}


VARIANTS = {
    "ddp context", "fsdp context", "fsdp grad-op", "fsdp hybrid", "fsdp hybrid 1", "fsdp offload",
    "zero1", "zero2 context", "zero2 offload", "zero2 round robin", "zero3 sub-groups",
    "zero3 tensor",
}  # fmt: skip
"""Strategies of the full tier: what they do is in others that are always tested."""


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(wrap, marks=[pytest.mark.full] if wrap in VARIANTS else [])
        for wrap in WRAPS
        if wrap != "zero3 hpz"
    ],
)
def test_resumed_equals_undisturbed_bit_for_bit(wrap: str, tmp_path: Path) -> None:
    ranks = RANKS.get(wrap, max(2, STRATEGIES[wrap].group))
    require_same_after_resume(tmp_path, ranks, BOTH, wrap=wrap, model=DROPOUT)


@pytest.mark.parametrize("dtype", BOTH)
def test_second_copies_of_weights_are_not_resumed_from(dtype: str, tmp_path: Path) -> None:
    """DeepSpeed makes the groups of hpZ once in a process."""
    one = {dtype: DTYPES[dtype]}
    require_same_after_resume(tmp_path, 2, one, wrap="zero3 hpz", model=DROPOUT)


@pytest.mark.parametrize(
    "wrap", ["ddp", pytest.param("zero2 offload", marks=pytest.mark.full), "zero3"]
)
def test_the_loss_scale_goes_on_too(wrap: str, tmp_path: Path) -> None:
    require_same_after_resume(tmp_path, 2, {"fp16": FP16}, wrap=wrap, model=DROPOUT)


def test_resumed_on_three_equals_undisturbed_where_gradients_come_in_buckets(
    tmp_path: Path,
) -> None:
    """From three addends on, a sum depends on which rank begins, and that depends on the bucket."""
    fp32 = {"fp32": DTYPES["fp32"]}
    require_same_after_resume(tmp_path, 3, fp32, wrap="ddp", frozen="", model=DROPOUT)


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_resumed_equals_undisturbed_with_state_on_disk(tmp_path: Path) -> None:
    """The model is large because 1 MiB is the smallest block that is swapped."""
    big = {"vocab_size": 6001, "hidden_size": 96, "num_attention_heads": 4}
    require_same_after_resume(
        tmp_path,
        2,
        BOTH,
        wrap="zero3 nvme",
        nvme=str(tmp_path / "nvme"),
        model={**DROPOUT, **big},
    )


def require_same_after_resume(
    tmp_path: Path, ranks: int, dtypes: dict[str, dict[str, Any]], **setting: Any
) -> None:
    """Compare under each dtype, one after another in a process group; resumed runs are in a new
    group."""
    runs = [(str(tmp_path / name), Setting(**setting, **fields)) for name, fields in dtypes.items()]
    whole = run_ranks(train_each, ranks, "whole", runs, {})[0]
    for folder, _ in runs:
        stopped_at_half(Path(folder, "whole"), Path(folder, "parts"))
    parts = run_ranks(train_each, ranks, "parts", runs, {"asynchronous": False})[0]
    for (folder, _), through, resumed in zip(runs, whole, parts, strict=True):
        assert [line["step"] for line in through if "loss" in line] == list(range(1, WHOLE + 1))
        assert numbers(resumed) == numbers(through), folder
        left = load_file(f"{folder}/whole/final.safetensors")
        right = load_file(f"{folder}/parts/final.safetensors")
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), folder


def test_other_strategies_and_world_sizes_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    """Global batches are the same for all ranks and micro-batches; only rounding differs."""
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
