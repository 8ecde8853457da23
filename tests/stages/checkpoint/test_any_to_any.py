"""A checkpoint of any strategy on any number of ranks is loaded by every other, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.checkpoint.formats import Reading
from pipeline.contracts.precision import LossScaling
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.formats.formats import Canonical, Dcp, DeepSpeed
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import (
    WRAPS,
    Setting,
    checkpoint_stage,
    hashed,
    load_run,
    make_engine,
    relay_run,
    save_run,
    train,
)
from tests.support.strategies import having
from tests.support.tier import spread
from tests.support.zero import has_libaio

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

# Every strategy loads a checkpoint of another and saves one that another loads, and every world
# size occurs. These are some of all pairs; benchmarks/any_to_any.py has all.
CHAINS = [
    [("ddp", 2), ("zero3", 3), ("fsdp full", 1), ("zero1", 2), ("fsdp offload", 3), ("ddp", 4)],
    [("zero2 offload", 2), ("fsdp full", 3), ("zero3 offload", 2), ("fsdp hybrid", 4), ("ddp", 1)],
    [("fsdp grad-op", 3), ("zero2 round robin", 2), ("fsdp hybrid 1", 2), ("zero2", 3), ("ddp", 3)],
    [
        ("zero1", 3),
        ("zero2", 1),
        ("fsdp offload", 2),
        ("zero3", 1),
        ("zero3 hpz", 2),
        ("zero2 round robin", 3),
    ],
    [
        ("zero2 tensor", 4),
        ("fsdp tensor", 2),
        ("zero3 tensor", 4),
        ("ddp", 1),
        ("zero1 tensor", 2),
        ("zero3", 3),
    ],
]
CHAINS = [[one for one in chain if one[0] in WRAPS] for chain in CHAINS]  # of this tier
LISTED = {wrap for chain in CHAINS for wrap, _ in chain}
OTHERS = {wrap: one for wrap, one in having("resumes").items() if wrap not in LISTED}
REST = [("ddp", 1), *((wrap, max(one.group, 2)) for wrap, one in OTHERS.items()), ("zero3", 2)]
"""Chain of the strategies that are in no other one."""


def travel(folder: Path, chain: list[tuple[str, int]], **setting: Any) -> list[dict[str, Any]]:
    """Train two steps under each strategy of a chain, from what the one before has saved; return
    the states after each."""
    states: list[dict[str, Any]] = []
    for place, (wrap, ranks) in enumerate(chain, 1):
        told = run_ranks(relay_run, ranks, str(folder), Setting(wrap=wrap, **setting))[0]
        assert not states or told["before"] == states[-1], f"into {wrap} on {ranks}"
        assert (told["progress"]["step"], told["progress"]["samples"]) == (2 * place, 24 * place)
        assert told["before"] != told["after"]
        states.append(told["after"])
    return states


@pytest.mark.parametrize("chain", [*spread(CHAINS, 2), REST], ids=lambda chain: chain[0][0])
def test_state_travels_between_strategies_and_world_sizes(
    chain: list[tuple[str, int]], tmp_path: Path
) -> None:
    saved = travel(tmp_path, chain)[-1]
    assert any(key.startswith("exp_avg_sq/") for key in saved)
    assert "model.layers.1.mlp.up_proj.weight" in saved["frozen"]
    assert saved["aliases"] == "{'lm_head.weight': 'model.embed_tokens.weight'}"


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
@pytest.mark.parametrize(("first", "second"), [("zero3 nvme", "fsdp full"), ("ddp", "zero3 nvme")])
def test_state_travels_from_and_to_disk_offload(first: str, second: str, tmp_path: Path) -> None:
    """The model is large because 1 MiB is the smallest block that is swapped."""
    big = {"vocab_size": 6001, "hidden_size": 96, "num_attention_heads": 4}
    nvme = str(tmp_path / "nvme")
    saved = run_ranks(save_run, 2, str(tmp_path), Setting(wrap=first, model=big, nvme=nvme), 2)[0]
    ranks = 3 if second == "fsdp full" else 2
    loaded = run_ranks(load_run, ranks, str(tmp_path), Setting(wrap=second, model=big, nvme=nvme))
    assert loaded[0]["state"] == saved


@pytest.mark.parametrize(
    "wrap", ["zero3", "fsdp tensor", pytest.param("fsdp pipeline", marks=pytest.mark.full)]
)
def test_a_full_checkpoint_is_written_by_all_and_opened_by_anyone(
    wrap: str, tmp_path: Path
) -> None:
    saved = run_ranks(save_run, 2, str(tmp_path / "run"), Setting(wrap=wrap, full=True))[0]
    folder = tmp_path / "run/checkpoints/step-00000003"
    weights = load_file(folder / "model.safetensors")
    moments = load_file(folder / "optimizer.safetensors")
    whole = {f"weight/{name}": tensor for name, tensor in weights.items()} | moments
    assert {key: hashed(tensor) for key, tensor in whole.items()} == {
        key: text for key, text in saved.items() if "/" in key
    }
    # another run starts from it under another strategy, and keeps its own sharded ones
    begin = {"start_from": str(folder)}
    loaded = run_ranks(
        load_run, 3, str(tmp_path / "new"), Setting(wrap="fsdp full", checkpoint=begin)
    )[0]
    assert loaded["state"] == saved
    assert loaded["progress"]["samples"] == 36


def restore_where_it_ran(dist: DistContext, folder: str, setting: Setting) -> list[list[float]]:
    """Run steps 2 and 3, and again after going back to step 2 in the same engine."""
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    train(engine, 0, 2)
    checkpoints.save(Progress(step=2))
    checkpoints.finish()
    first = train(engine, 2, 4)
    checkpoints.restore(lambda progress: None)
    again = train(engine, 2, 4)
    checkpoints.close()
    engine.close()
    return [first, again]


@pytest.mark.parametrize("wrap", [*having("basic"), "zero3 offload"])
def test_an_engine_that_has_run_goes_back(wrap: str, tmp_path: Path) -> None:
    first, again = run_ranks(restore_where_it_ran, 2, str(tmp_path), Setting(wrap=wrap))[0]
    assert first == again


def test_half_precision_keeps_fp32_masters_and_the_loss_scale(tmp_path: Path) -> None:
    chain = [("zero1", 2), ("fsdp full", 3), ("zero3", 2), ("ddp", 3), ("zero2", 2)]
    scaling = LossScaling(initial_scale=2.0**10, growth_interval=3)
    states = travel(tmp_path, chain, compute="fp16", loss_scaling=scaling, frozen="")
    found = [state["loss_scale"] for state in states]
    assert "scale=1024.0, good_steps=2" in found[0]
    assert "scale=2048.0, good_steps=1" in found[1]
    assert "scale=8192.0, good_steps=1" in found[4]


@pytest.mark.parametrize(("first", "second"), [("fsdp full", "zero2"), ("zero2", "ddp")])
def test_a_parameter_without_elements(first: str, second: str, tmp_path: Path) -> None:
    saved = run_ranks(save_run, 2, str(tmp_path), Setting(wrap=first, empty=True))[0]
    loaded = run_ranks(load_run, 2, str(tmp_path), Setting(wrap=second, empty=True))[0]
    assert loaded["state"] == saved
    source = Canonical().open(tmp_path / "checkpoints/step-00000003", Reading())
    assert "empty" not in source.state.updates
    for form in (Dcp(), DeepSpeed()):
        form.write(source, tmp_path / form.name)
        copy = form.open(tmp_path / form.name, Reading())
        assert copy.state.updates == source.state.updates


def test_a_frozen_layer_keeps_the_precision_that_its_strategy_holds(tmp_path: Path) -> None:
    """bf16 training holds frozen weights in bf16 under ZeRO and in fp32 under DDP; values from the
    same source are not rounded in between."""
    under = {"compute": "bf16"}
    saved = run_ranks(save_run, 2, str(tmp_path), Setting(wrap="zero3", **under))[0]
    fresh = run_ranks(save_run, 1, str(tmp_path / "fresh"), Setting(wrap="ddp", **under), 0)[0]
    loaded = run_ranks(load_run, 1, str(tmp_path), Setting(wrap="ddp", **under))[0]["state"]
    frozen = {key for key in saved if key.startswith("weight/model.layers.1.")}
    assert frozen
    assert {key: loaded[key] for key in frozen} == {key: fresh[key] for key in frozen}
    assert {k: v for k, v in loaded.items() if k not in frozen} == {
        k: v for k, v in saved.items() if k not in frozen
    }
