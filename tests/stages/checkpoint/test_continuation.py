"""An interrupted training continues as if nothing had happened."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.contracts.metrics import kind_of, records
from pipeline.contracts.optimizer import LossScaling
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.consolidate.stream import ConsolidateStream
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from tests.support.matrix import LION
from tests.support.processes import GROUP_LIMIT, in_turn, run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import ADAMW, WRAPS, Setting, make_engine, source
from tests.support.strategies import STRATEGIES
from tests.support.tier import FULL
from tests.support.zero import has_libaio

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

HALF, WHOLE, BATCH, EPOCH = 4, 6, 6, 20
NUMBERS = ("step", "loss", "grad_norm", "tokens", "samples", "eval_loss", "loss_scale")
Lines = list[dict[str, Any]]


def train(
    dist: DistContext, folder: str, setting: Setting, micro: int, checkpoint: dict[str, Any]
) -> Lines:
    """Train to the last step from the folder's newest checkpoint, saving half way: step 4 is in the
    second epoch."""
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5).run(ctx)
    engine = make_engine(ctx, setting)
    checkpoints = ShardedCheckpoint(every=HALF, keep=None, **checkpoint).run(ctx, engine)
    loop = TrainCausalLm(
        global_batch_size=BATCH, steps=WHOLE, micro_batch_size=micro, log_every=2, eval_every=5
    )
    trained = loop.run(ctx, engine, toy_data(EPOCH), plan, checkpoints, source(ctx, setting))
    checkpoints.close()
    engine.close()
    if dist.is_main:
        save_file(dict(ConsolidateStream().run(ctx, trained)), f"{folder}/final.safetensors")
    found = records(ctx.run_dir / "metrics.jsonl")
    return [record for record in found if kind_of(record) != "checkpoint written"]


def stopped_at_half(whole: Path, to: Path) -> None:
    """Leave the files of a run that saved step 4 and was stopped while it recorded a later one."""
    place = f"checkpoints/step-{HALF:08d}"
    shutil.copytree(whole / place, to / place)
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if kind_of(json.loads(line)) != "checkpoint written"]
    assert json.loads(lines[6])["step"] > HALF
    (to / "metrics.jsonl").write_text("".join(lines[:7]) + lines[7][:20])


VARIANTS = {
    "ddp context", "fsdp context", "fsdp grad-op", "fsdp hybrid", "fsdp hybrid 1", "fsdp offload",
    "zero1", "zero2 context", "zero2 offload", "zero2 round robin", "zero3 sub-groups",
    "zero3 tensor",
}  # fmt: skip
"""Strategies of the full tier: what they do is in others that are always tested."""
RANKS = {"fsdp hybrid": 4, "fsdp full": 3, "zero2": 3}
LARGE = {"vocab_size": 301, "hidden_size": 64, "intermediate_size": 96}
"""Sizes with which some parameters, and their shards, have blocks and some more elements."""
SWAPPED = {"vocab_size": 6001, "hidden_size": 96, "num_attention_heads": 4}
"""A large model, as 1 MiB is the smallest block that is swapped."""
DROPOUT = {"attention_dropout": 0.1}
FP16 = {"compute": "fp16", "loss_scaling": LossScaling(initial_scale=256.0, growth_interval=3)}
BF16 = {"compute": "bf16", "master": "bf16"}
KEPT: dict[str, dict[str, Any]] = {
    **{
        kept: {"optimizer": replace(ADAMW, moments=kept, kernel="single")}
        for kept in ("8bit", "bf16")
    },
    "rounded": {"optimizer": replace(ADAMW, stochastic_rounding=True, kernel="single"), **BF16},
    "lion": {"optimizer": LION},
}
"""Optimizers other than plain AdamW."""


class Run(NamedTuple):
    """A training on so many ranks."""

    ranks: int
    setting: Setting

    @property
    def group(self) -> tuple[int, str]:
        """What runs in the same processes have in common: DeepSpeed makes hpZ's groups once."""
        return self.ranks, self.setting.compute if self.setting.wrap == "zero3 hpz" else ""


def _runs() -> dict[str, Run]:
    found = {}
    # bf16 has all the state of fp32, and masters next to the weights
    for wrap in (one for one in WRAPS if FULL or one not in VARIANTS):
        ranks = RANKS.get(wrap, max(2, STRATEGIES[wrap].group))
        for compute in ("fp32", "bf16") if FULL else ("bf16",):
            found[f"{wrap} {compute}"] = Run(
                ranks, Setting(wrap=wrap, compute=compute, model=DROPOUT)
            )
    for wrap in ("ddp", "zero3", *(["zero2 offload"] if FULL else [])):
        found[f"{wrap} fp16"] = Run(2, Setting(wrap=wrap, model=DROPOUT, **FP16))
    # From three addends on, a sum depends on which rank begins, and that depends on the bucket.
    found["ddp on three, fp32"] = Run(3, Setting(wrap="ddp", frozen="", model=DROPOUT))
    if has_libaio():
        for compute in ("fp32", "bf16") if FULL else ("bf16",):
            found[f"zero3 nvme {compute}"] = Run(
                2, Setting(wrap="zero3 nvme", compute=compute, model={**DROPOUT, **SWAPPED})
            )
    kept = {"ddp": (2, ["8bit"]), "zero2": (3, ["8bit", "lion"]), "zero2 offload": (2, ["8bit"])}
    if FULL:
        kept |= {
            "fsdp full": (3, ["8bit", "rounded"]), "zero3 sub-groups": (2, ["bf16", "rounded"])
        }  # fmt: skip
    for wrap, (ranks, names) in kept.items():
        for name in names:
            setting = Setting(wrap=wrap, model=LARGE, frozen="", **KEPT[name])
            found[f"{wrap} {name}"] = Run(ranks, setting)
    return found


PLAIN = Run(2, Setting(wrap="ddp"))
RUNS = _runs()
ELSEWHERE = {
    "fsdp full": (Run(3, Setting(wrap="fsdp full")), 1),
    "zero3": (Run(1, Setting(wrap="zero3")), 6),
    "zero2 offload": (Run(2, Setting(wrap="zero2 offload")), 2),
}
"""Strategy -> a run that goes on with the one of PLAIN, and its samples of a micro-batch."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Lines]]:
    """Return the folder and the metrics of a run: `whole`, or from half of it in `parts`. Runs on
    as many ranks are one after another in a process group, resumed ones in a new group."""
    root = tmp_path_factory.mktemp("trained")
    plain = {"plain": PLAIN, **RUNS}

    def placed(setting: Setting) -> Setting:
        return replace(setting, nvme=str(root / "nvme") if "nvme" in setting.wrap else "")

    @functools.cache
    def whole(group: tuple[int, str]) -> dict[str, Lines]:
        own = {name: run for name, run in plain.items() if run.group == group}
        calls = [
            (train, str(root / "whole" / name), placed(run.setting), 2, {})
            for name, run in own.items()
        ]
        return dict(
            zip(own, run_ranks(in_turn, group[0], calls, limit=GROUP_LIMIT)[0], strict=True)
        )

    @functools.cache
    def parts(group: tuple[int, str]) -> dict[str, Lines]:
        calls = []
        own = {name: (run, 2, name) for name, run in RUNS.items() if run.group == group}
        for wrap, (run, micro) in ELSEWHERE.items():
            if run.group == group:
                own[f"{wrap} elsewhere"] = run, micro, "plain"
        for name, (run, micro, origin) in own.items():
            whole(plain[origin].group)
            stopped_at_half(root / "whole" / origin, root / "parts" / name)
            options = {} if origin == "plain" else {"asynchronous": False}
            calls.append((train, str(root / "parts" / name), placed(run.setting), micro, options))
        return dict(
            zip(own, run_ranks(in_turn, group[0], calls, limit=GROUP_LIMIT)[0], strict=True)
        )

    def found(kind: str, name: str) -> tuple[Path, Lines]:
        made = {"whole": whole, "parts": parts}[kind]
        base = name.removesuffix(" elsewhere")
        run = ELSEWHERE[base][0] if base != name else plain[name]
        return root / kind / name, made(run.group)[name]

    return found


def numbers(lines: Lines) -> list[list[Any]]:
    return [[line.get(name) for name in NUMBERS] for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_resumed_equals_undisturbed_bit_for_bit(name: str, trained: Any) -> None:
    (whole, through), (parts, resumed) = trained("whole", name), trained("parts", name)
    assert [line["step"] for line in through if "loss" in line] == list(range(1, WHOLE + 1))
    assert numbers(resumed) == numbers(through)
    left, right = load_file(whole / "final.safetensors"), load_file(parts / "final.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("wrap", ELSEWHERE)
def test_other_strategies_and_world_sizes_go_on_with_the_same_numbers(
    wrap: str, trained: Any
) -> None:
    """Global batches are the same for all ranks and micro-batches; only rounding differs."""
    (whole, through), (parts, resumed) = (
        trained("whole", "plain"), trained("parts", f"{wrap} elsewhere")
    )  # fmt: skip
    losses = [line["loss"] for line in resumed if "loss" in line]
    assert losses == pytest.approx([r["loss"] for r in through if "loss" in r], rel=1e-5)
    for name in ("step", "samples", "tokens"):
        assert [line.get(name) for line in resumed] == [line.get(name) for line in through]
    final = load_file(parts / "final.safetensors")
    for key, weight in load_file(whole / "final.safetensors").items():
        torch.testing.assert_close(final[key], weight, rtol=0, atol=1e-4, msg=key)
