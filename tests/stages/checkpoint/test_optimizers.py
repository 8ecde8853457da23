"""Optimizers other than plain AdamW: their state is saved, resumed, and moved to other
strategies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from tests.support.processes import in_turn, run_ranks
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


@pytest.mark.parametrize("wrap", spread(["fsdp hybrid", "ddp"], 1))
def test_replicas_round_alike(wrap: str, tmp_path: Path) -> None:
    """The digest of `save_run` fails where replicas differ in a bit."""
    setting = Setting(wrap=wrap, model=LARGE, frozen="", optimizer=ROUNDED, **BF16)
    ranks = 4 if wrap == "fsdp hybrid" else 2
    nearest = replace(setting, optimizer=replace(ROUNDED, stochastic_rounding=False))
    calls = [(save_run, str(tmp_path / "a"), setting), (save_run, str(tmp_path / "b"), nearest)]
    rounded, other = run_ranks(in_turn, ranks, calls)[0]
    assert rounded != other


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


def test_other_shards_have_other_blocks(tmp_path: Path) -> None:
    """The same shards have the same bits; in others each value is rounded once more, by at most
    half a gap of its block's largest value."""
    kept = Setting(
        wrap="", model=LARGE, frozen="", full=True, optimizer=LOW_BIT["8bit"],
        checkpoint={"keep": None},
    )  # fmt: skip
    pairs = {"ddp": "fsdp full", "zero2": "ddp"}
    settings = [(str(tmp_path / wrap), replace(kept, wrap=wrap)) for wrap in pairs]
    calls = [(one, *setting) for setting in settings for one in (save_run, load_run)]
    told = run_ranks(in_turn, 2, calls)[0]
    assert [loaded["state"] for loaded in told[1::2]] == told[::2]
    calls = [(carry, str(tmp_path / one), replace(kept, wrap=to)) for one, to in pairs.items()]
    run_ranks(in_turn, 3, calls)
    for folder, _ in settings:
        before, after = moments(Path(folder), 3), moments(Path(folder), 9)
        assert before.keys() == after.keys()
        wrong = {
            key: float((after[key] - value).abs().max() / value.abs().max())
            for key, value in before.items()
        }
        assert 0 < max(wrong.values()) < 0.0072
        files = [Path(folder, f"checkpoints/step-{n:08d}/model.safetensors") for n in (3, 9)]
        loaded = [load_file(file) for file in files]
        assert all(torch.equal(loaded[0][key], loaded[1][key]) for key in loaded[0])


def test_moments_in_few_bits_take_no_more_room_than_others(tmp_path: Path) -> None:
    kept = {"plain": ADAMW, "low": LOW_BIT["8bit"]}
    setting = Setting(wrap="ddp", model=LARGE, full=True)
    calls = [
        (save_run, str(tmp_path / name), replace(setting, optimizer=optimizer))
        for name, optimizer in kept.items()
    ]
    run_ranks(in_turn, 1, calls)
    file = "checkpoints/step-00000003/optimizer.safetensors"
    assert len({(tmp_path / name / file).stat().st_size for name in kept}) == 1


def test_a_run_with_fp32_moments_goes_on_in_8_bits_and_back(tmp_path: Path) -> None:
    plain = Setting(wrap="ddp", model=LARGE, frozen="", full=True, checkpoint={"keep": None})
    low = replace(plain, optimizer=LOW_BIT["8bit"])
    at = str(tmp_path)
    calls = [(save_run, at, plain), (carry, at, low), (load_run, at, low), (load_run, at, plain)]
    *_, first, second = run_ranks(in_turn, 2, calls)[0]
    before, after = moments(tmp_path, 3), moments(tmp_path, 9)
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert first["state"] == second["state"]
