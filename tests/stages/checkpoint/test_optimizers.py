"""Optimizers other than plain AdamW: their state is saved, resumed, and moved to other
strategies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.optimizer.lion import Lion
from stages.optimizer.settings import GroupSettings
from tests.stages.checkpoint.test_any_to_any import travel
from tests.stages.checkpoint.test_continuation import require_same_after_resume
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import (
    ADAMW,
    Setting,
    checkpoint_stage,
    load_run,
    make_engine,
    save_run,
)
from tests.support.tier import spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

LARGE = {"vocab_size": 301, "hidden_size": 64, "intermediate_size": 96}
"""Sizes with which some parameters, and their shards, have blocks and some more elements."""
LOW_BIT = {kept: replace(ADAMW, moments=kept, kernel="single") for kept in ("8bit", "bf16")}
ROUNDED = replace(ADAMW, stochastic_rounding=True, kernel="single")
BF16 = {"compute": "bf16", "master": "bf16"}
GROUPS = (
    GroupSettings(match=("*.embed_tokens.*",), lr_ratio=0.5, weight_decay=0.0),
    GroupSettings(match=("*.q_proj.*", "*.norm.*"), lr_ratio=4.0),
)
LION = Lion(lr=1e-4, max_grad_norm=0.5, groups=GROUPS)

RUNS: dict[str, dict[str, Any]] = {
    **{kept: {"optimizer": stage} for kept, stage in LOW_BIT.items()},
    "rounded": {"optimizer": ROUNDED, **BF16},
    "lion": {"optimizer": LION},
}
CASES = {
    "ddp": (2, ("8bit",)),
    "fsdp full": (3, ("8bit", "rounded")),
    "zero2": (3, ("8bit", "lion")),
    "zero3 sub-groups": (2, ("bf16", "rounded")),
    "zero2 offload": (2, ("8bit",)),
}


@pytest.mark.parametrize("wrap", spread(list(CASES), 3))
def test_resumed_equals_undisturbed_bit_for_bit(wrap: str, tmp_path: Path) -> None:
    ranks, names = CASES[wrap]
    runs = {name: RUNS[name] for name in names}
    require_same_after_resume(tmp_path, ranks, runs, wrap=wrap, model=LARGE, frozen="")


@pytest.mark.parametrize("wrap", spread(["fsdp hybrid", "ddp"], 1))
def test_replicas_round_alike(wrap: str, tmp_path: Path) -> None:
    """The digest of `save_run` fails where replicas differ in a bit."""
    setting = Setting(wrap=wrap, model=LARGE, frozen="", optimizer=ROUNDED, **BF16)
    ranks = 4 if wrap == "fsdp hybrid" else 2
    rounded = run_ranks(save_run, ranks, str(tmp_path / "a"), setting)[0]
    nearest = replace(setting, optimizer=replace(ROUNDED, stochastic_rounding=False))
    assert rounded != run_ranks(save_run, ranks, str(tmp_path / "b"), nearest)[0]


def rounding_numbers(dist: DistContext, folder: str) -> dict[str, list[int]]:
    """Return by strategy the numbers that seed the noise of this rank's groups of parameters."""
    found = {}
    for wrap in ("fsdp full", "fsdp hybrid", "fsdp hybrid 1"):
        engine = make_engine(
            context(dist, folder), Setting(wrap=wrap, optimizer=ROUNDED, frozen="", **BF16)
        )
        found[wrap] = sorted(
            {group["shard"] for group in engine.optimizers[0].optimizer.param_groups}
        )
        engine.close()
    return found


def test_shards_round_each_by_noise_of_its_own(tmp_path: Path) -> None:
    told = run_ranks(rounding_numbers, 4, str(tmp_path))
    assert [one["fsdp full"] for one in told] == [[0], [1], [2], [3]]
    assert [one["fsdp hybrid"] for one in told] == [[0], [1], [0], [1]]
    assert [one["fsdp hybrid 1"] for one in told] == [[0]] * 4


CHAINS: dict[str, tuple[Any, list[tuple[str, int]]]] = {
    "lion": (LION, [("ddp", 2), ("zero3", 3), ("fsdp full", 1), ("zero1", 2), ("ddp", 1)]),
    "groups": (
        replace(ADAMW, groups=GROUPS),
        [("fsdp full", 2), ("zero2", 2), ("zero3 sub-groups", 3), ("zero2 offload", 2)],
    ),
    "bf16": (LOW_BIT["bf16"], [("zero2", 2), ("fsdp full", 3), ("ddp", 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", spread(list(CHAINS), 2))
def test_state_travels_between_strategies_and_world_sizes(name: str, tmp_path: Path) -> None:
    optimizer, chain = CHAINS[name]
    saved = travel(tmp_path, chain, optimizer=optimizer)[-1]
    # this includes Lion's, whose state has no count
    assert f", {2 * len(chain)})" in saved["updates"]
    # embeddings have half the rate of the others
    assert any(rate in saved["groups"] for rate in ("0.0005)", "5e-05)")) == (name != "bf16")


def carry(dist: DistContext, folder: str, setting: Setting) -> None:
    """Restore the newest checkpoint and save it again as step 9."""
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    assert checkpoints.restore(lambda progress: None) is not None
    checkpoints.save(Progress(step=9))
    checkpoints.finish()
    checkpoints.close()
    engine.close()


def moments(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/step-{step:08d}/optimizer.safetensors")


@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp full"), ("zero2", "ddp")])
def test_other_shards_have_other_blocks(first: str, second: str, tmp_path: Path) -> None:
    """The same shards have the same bits; in others each value is rounded once more, by at most
    half a gap of its block's largest value."""
    setting = Setting(
        wrap=first, model=LARGE, frozen="", full=True, optimizer=LOW_BIT["8bit"],
        checkpoint={"keep": None},
    )  # fmt: skip
    saved = run_ranks(save_run, 2, str(tmp_path), setting)[0]
    assert run_ranks(load_run, 2, str(tmp_path), setting)[0]["state"] == saved
    run_ranks(carry, 3, str(tmp_path), replace(setting, wrap=second))
    before, after = moments(tmp_path, 3), moments(tmp_path, 9)
    assert before.keys() == after.keys()
    wrong = {
        key: float((after[key] - value).abs().max() / value.abs().max())
        for key, value in before.items()
    }
    assert 0 < max(wrong.values()) < 0.0072
    weights = [tmp_path / f"checkpoints/step-{n:08d}/model.safetensors" for n in (3, 9)]
    loaded = [load_file(file) for file in weights]
    assert all(torch.equal(loaded[0][key], loaded[1][key]) for key in loaded[0])


def test_moments_in_few_bits_take_no_more_room_than_others(tmp_path: Path) -> None:
    sizes = []
    for name, optimizer in (("plain", ADAMW), ("low", LOW_BIT["8bit"])):
        setting = Setting(wrap="ddp", model=LARGE, full=True, optimizer=optimizer)
        run_ranks(save_run, 1, str(tmp_path / name), setting)
        folder = tmp_path / name / "checkpoints/step-00000003"
        sizes.append((folder / "optimizer.safetensors").stat().st_size)
    assert sizes[0] == sizes[1]


def test_a_run_with_fp32_moments_goes_on_in_8_bits_and_back(tmp_path: Path) -> None:
    plain = Setting(wrap="ddp", model=LARGE, frozen="", full=True, checkpoint={"keep": None})
    low = replace(plain, optimizer=LOW_BIT["8bit"])
    run_ranks(save_run, 2, str(tmp_path), plain)
    run_ranks(carry, 2, str(tmp_path), low)
    before, after = moments(tmp_path, 3), moments(tmp_path, 9)
    assert any(not torch.equal(before[key], after[key]) for key in before)
    states = [run_ranks(load_run, 2, str(tmp_path), s)[0]["state"] for s in (low, plain)]
    assert states[0] == states[1]
