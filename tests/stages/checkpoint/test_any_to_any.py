"""A checkpoint of any strategy on any number of ranks is loaded by every other, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.checkpoint.formats import Reading
from pipeline.contracts.optimizer import LossScaling
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.formats.formats import Canonical, Dcp, DeepSpeed
from tests.support.matrix import CASES, HALF, Matrix, sources
from tests.support.processes import in_turn, run_ranks
from tests.support.runs import context
from tests.support.state import (
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
from tests.support.tier import FULL
from tests.support.zero import has_libaio

pytestmark = pytest.mark.usefixtures("deepspeed_operators")


@pytest.mark.parametrize("name", CASES)
def test_state_travels_between_strategies_and_world_sizes(name: str, matrix: Matrix) -> None:
    """In the quick tier these are some of all pairs; the full tier and benchmarks/any_to_any.py
    have all."""
    own, optimizer = matrix.saved(name), CASES[name].optimizer
    assert own["half"] != own["end"]
    assert "model.layers.1.mlp.up_proj.weight" in own["half"]["frozen"]
    assert own["half"]["aliases"] == "{'lm_head.weight': 'model.embed_tokens.weight'}"
    assert any(key.startswith("exp_avg_sq/") for key in own["half"]) == (optimizer != "lion")
    # this includes Lion's, whose state has no count
    assert f", {HALF})" in own["half"]["updates"]
    halved = any(rate in own["half"]["groups"] for rate in ("0.0005)", "5e-05)"))
    assert halved == (optimizer in ("lion", "groups"))  # embeddings have half the rate of others
    loaded = matrix.loaded(name)
    assert list(loaded) == sources(name)
    for source, found in loaded.items():
        assert found["state"] == matrix.saved(source)["half"], f"from {source}"
        progress = found["progress"]
        assert (progress["step"], progress["samples"]) == (HALF, 12 * HALF)


@pytest.mark.parametrize("name", CASES)
def test_the_same_strategy_goes_on_to_the_same_end(name: str, matrix: Matrix) -> None:
    own, again = matrix.saved(name), matrix.loaded(name)[name]
    assert (again["losses"], again["end"]) == (own["losses"], own["end"])


BIG = {"vocab_size": 6001, "hidden_size": 96, "num_attention_heads": 4}
"""The model is large because 1 MiB is the smallest block that is swapped."""


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_state_travels_from_and_to_disk_offload(tmp_path: Path) -> None:
    on_disk = Setting(wrap="zero3 nvme", model=BIG, nvme=str(tmp_path / "nvme"))
    plain, one, two = Setting(wrap="ddp", model=BIG), str(tmp_path / "1"), str(tmp_path / "2")
    saves = [(save_run, one, on_disk, 2), (save_run, two, plain, 2)]
    first, second, loaded = run_ranks(in_turn, 2, [*saves, (load_run, two, on_disk)])[0]
    assert loaded["state"] == second
    sharded = Setting(wrap="fsdp full", model=BIG)
    assert run_ranks(load_run, 3, one, sharded)[0]["state"] == first


def test_a_full_checkpoint_is_written_by_all_and_opened_by_anyone(tmp_path: Path) -> None:
    wraps = ["zero3", "fsdp tensor", *(["fsdp pipeline"] if FULL else [])]
    saves = [(save_run, str(tmp_path / wrap), Setting(wrap=wrap, full=True)) for wrap in wraps]
    # another run starts from each under another strategy, and keeps its own sharded ones
    places = [tmp_path / wrap / "checkpoints/step-00000003" for wrap in wraps]
    begins = [Setting(wrap="fsdp full", checkpoint={"start_from": str(one)}) for one in places]
    loads = [
        (load_run, str(tmp_path / f"from {wrap}"), one)
        for wrap, one in zip(wraps, begins, strict=True)
    ]
    told = run_ranks(in_turn, 2, saves)[0]
    for saved, folder, loaded in zip(told, places, run_ranks(in_turn, 3, loads)[0], strict=True):
        weights = load_file(folder / "model.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
        whole = {f"weight/{name}": tensor for name, tensor in weights.items()} | moments
        assert {key: hashed(tensor) for key, tensor in whole.items()} == {
            key: text for key, text in saved.items() if "/" in key
        }
        assert loaded["state"] == saved
        assert loaded["progress"]["samples"] == 36


def restore_where_it_ran(dist: DistContext, folder: str, setting: Setting) -> list[list[float]]:
    """Run steps 2 and 3, and again after going back to step 2 in the same engine."""
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    train(engine, 0, 2, 4)
    checkpoints.save(Progress(step=2))
    checkpoints.finish()
    first = train(engine, 2, 4, 4)
    checkpoints.restore(lambda progress: None)
    again = train(engine, 2, 4, 4)
    checkpoints.close()
    engine.close()
    return [first, again]


def test_an_engine_that_has_run_goes_back(tmp_path: Path) -> None:
    wraps = [*having("basic"), "zero3 offload"]
    calls = [(restore_where_it_ran, str(tmp_path / wrap), Setting(wrap=wrap)) for wrap in wraps]
    for wrap, (first, again) in zip(wraps, run_ranks(in_turn, 2, calls)[0], strict=True):
        assert first == again, wrap


def test_half_precision_keeps_fp32_masters_and_the_loss_scale(tmp_path: Path) -> None:
    scaling = LossScaling(initial_scale=2.0**10, growth_interval=3)
    states: list[dict[str, Any]] = []
    for ranks, wraps in ((2, ["zero1"]), (3, ["fsdp full", "ddp"]), (2, ["zero3", "zero2"])):
        settings = [
            Setting(wrap=one, compute="fp16", loss_scaling=scaling, frozen="") for one in wraps
        ]
        calls = [(relay_run, str(tmp_path), setting) for setting in settings]
        for told in run_ranks(in_turn, ranks, calls)[0]:
            assert not states or told["before"] == states[-1]
            assert told["before"] != told["after"]
            states.append(told["after"])
            step, samples = told["progress"]["step"], told["progress"]["samples"]
            assert (step, samples) == (2 * len(states), 24 * len(states))
    found = [state["loss_scale"] for state in states]
    assert "scale=1024.0, good_steps=2" in found[0]
    assert "scale=2048.0, good_steps=1" in found[1]
    assert "scale=8192.0, good_steps=1" in found[4]


def test_a_parameter_without_elements(tmp_path: Path) -> None:
    settings = [Setting(wrap=wrap, empty=True) for wrap in ("fsdp full", "zero2", "ddp")]
    pairs = list(
        zip(settings, settings[1:], [str(tmp_path / "1"), str(tmp_path / "2")], strict=False)
    )
    calls = [((save_run, at, one), (load_run, at, other)) for one, other, at in pairs]
    told = run_ranks(in_turn, 2, [call for both in calls for call in both])[0]
    for (_, _, folder), saved, loaded in zip(pairs, told[::2], told[1::2], strict=True):
        assert loaded["state"] == saved
        source = Canonical().open(Path(folder, "checkpoints/step-00000003"), Reading())
        assert "empty" not in source.state.updates
        for form in (Dcp(), DeepSpeed()):
            form.write(source, Path(folder, form.name))
            copy = form.open(Path(folder, form.name), Reading())
            assert copy.state.updates == source.state.updates


def test_a_frozen_layer_keeps_the_precision_that_its_strategy_holds(tmp_path: Path) -> None:
    """bf16 training holds frozen weights in bf16 under ZeRO and in fp32 under DDP; values from the
    same source are not rounded in between."""
    saved = run_ranks(save_run, 2, str(tmp_path), Setting(wrap="zero3", compute="bf16"))[0]
    ddp = Setting(wrap="ddp", compute="bf16")
    calls = [(save_run, str(tmp_path / "fresh"), ddp, 0), (load_run, str(tmp_path), ddp)]
    fresh, found = run_ranks(in_turn, 1, calls)[0]
    loaded = found["state"]
    frozen = {key for key in saved if key.startswith("weight/model.layers.1.")}
    assert frozen
    assert {key: loaded[key] for key in frozen} == {key: fresh[key] for key in frozen}
    assert {k: v for k, v in loaded.items() if k not in frozen} == {
        k: v for k, v in saved.items() if k not in frozen
    }
