"""DeepSpeed's checkpoints: what was live comes out of every kind, and goes into DeepSpeed again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.artifacts import LossScaling
from pipeline.errors import CheckpointError
from pipeline.state.formats import Reading
from pipeline.state.source import StateSource
from stages.formats.canonical import Canonical
from stages.formats.deepspeed import DeepSpeed
from tests.support.formats import digest_of, load_universal, same, save_deepspeed
from tests.support.processes import run_ranks
from tests.support.state import Setting, load_run
from tests.support.zero import has_libaio

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

STEP = "step-00000003"
FP16 = LossScaling(initial_scale=2.0**10, growth_interval=1000)
CASES = {
    "1 bf16": (Setting(wrap="zero1", compute="bf16"), 3),
    "2 round robin": (Setting(wrap="zero2 round robin"), 2),
    "2 offload fp16": (Setting(wrap="zero2 offload", compute="fp16", loss_scaling=FP16), 2),
    "3 sub-groups": (Setting(wrap="zero3 sub-groups", compute="bf16"), 3),
    "3 alone": (Setting(wrap="zero3"), 1),
}


def opened(folder: Path, **reading: Any) -> StateSource:
    form = DeepSpeed()
    assert form.detect(folder)
    return form.open(folder, Reading(**reading))


@pytest.mark.parametrize("name", CASES)
def test_the_live_state_comes_out(name: str, tmp_path: Path) -> None:
    setting, ranks = CASES[name]
    live = run_ranks(save_deepspeed, ranks, str(tmp_path), setting)[0]
    source = opened(tmp_path / "checkpoints" / STEP)
    assert digest_of(source) == same(live)
    assert sum(key.startswith("exp_avg_sq/") for key in live) == 20
    assert (source.step, source.world_size, source.progress["samples"]) == (3, ranks, 36)
    assert source.progress["origin"] == {"seed": 7}
    assert [group.settings["weight_decay"] for group in source.state.groups] == [0.1, 0.0]
    assert [len(group.parameters) for group in source.state.groups] == [15, 5]
    assert (source.state.loss_scale is not None) == (setting.loss_scaling is not None)
    assert f"random/{ranks - 1:05d}/torch" in source.tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a checkpoint of ZeRO-2 on two ranks, and what was live."""
    folder = tmp_path_factory.mktemp("saved")
    live = run_ranks(save_deepspeed, 2, str(folder), Setting(wrap="zero2"))[0]
    return folder / "checkpoints" / STEP, live


def test_other_strategies_and_deepspeed_itself_load_what_was_converted(
    saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, live = saved
    source = opened(folder)
    Canonical().write(source, tmp_path / "checkpoints" / STEP)
    loaded = run_ranks(load_run, 1, str(tmp_path), Setting(wrap="fsdp full"))[0]
    assert same(loaded["state"]) == same(live)
    assert loaded["progress"]["samples"] == 36

    canonical = Canonical().open(tmp_path / "checkpoints" / STEP, Reading())
    notes = DeepSpeed().write(canonical, tmp_path / "universal")
    assert any("hyperparameters of the first" in note for note in notes)
    back = opened(tmp_path / "universal")
    assert digest_of(back) == same(live)
    assert [(sorted(g.parameters), g.settings) for g in back.state.groups] == [
        (sorted(g.parameters), g.settings) for g in source.state.groups
    ]
    assert back.progress == source.progress
    wraps = ["zero1", "zero2", "zero2 offload", "zero3", "zero3 offload"]
    for wrap, found in zip(
        wraps, run_ranks(load_universal, 2, str(tmp_path), wraps)[0], strict=True
    ):
        # DeepSpeed leaves frozen parameters as they are; here they never changed.
        assert same(found["state"]) == same(live), wrap
        decays = found["decays"]
        assert decays == ([0.1, 0.1] if wrap.startswith("zero3") else [0.1, 0.0]), wrap
        stops = "`state_steps` argument must contain a list of singleton tensors"
        assert (stops if wrap == "zero3" else "goes on") in found["next"], wrap


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_state_on_disk(tmp_path: Path) -> None:
    big = {"vocab_size": 6001, "hidden_size": 120, "num_attention_heads": 4}
    setting = Setting(wrap="zero3 nvme", model=big, nvme=str(tmp_path / "nvme"))
    live = run_ranks(save_deepspeed, 2, str(tmp_path), setting, 2)[0]
    folder = tmp_path / "checkpoints" / "step-00000002"
    assert digest_of(opened(folder)) == same(live)
    swapped = sorted((folder / "state" / "offloaded_tensors").rglob("*.swp"))
    swapped[0].unlink()
    with pytest.raises(CheckpointError, match=r"\.swp: missing; it holds a part"):
        opened(folder)


class Damage:
    """Changes of a copy of a checkpoint, and what is said of them."""

    @staticmethod
    def rank_gone(state: Path) -> str:
        (state / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        return "has the optimizer state of 1 ranks, 2 saved"

    @staticmethod
    def first_rank_gone(state: Path) -> str:
        (state / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
        return "the file of rank 0 .* is missing"

    @staticmethod
    def model_gone(state: Path) -> str:
        (state / "mp_rank_00_model_states.pt").unlink()
        return r"no \*_model_states.pt"

    @staticmethod
    def truncated(state: Path) -> str:
        file = state / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        file.write_bytes(file.read_bytes()[:-100])
        return "cannot be read"

    @staticmethod
    def flipped(state: Path) -> str:
        file = state / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        return "damaged: the checksum of .* in it is wrong|cannot be read"

    @staticmethod
    def pickle(state: Path) -> str:
        file = state / "mp_rank_00_model_states.pt"
        torch.save({"module": Bomb()}, file)
        return "refused: it holds posix.system, and reading that could run code"

    @staticmethod
    def tag_elsewhere(state: Path) -> str:
        (state.parent / "latest").write_text("../../elsewhere")
        return "latest: names no folder beside it"

    @staticmethod
    def tensor_parallel(state: Path) -> str:
        shutil.copy(state / "mp_rank_00_model_states.pt", state / "mp_rank_01_model_states.pt")
        return "tensor, pipeline or expert parallelism"

    @staticmethod
    def reordered(state: Path) -> str:
        file = state / "mp_rank_00_model_states.pt"
        content = torch.load(file, weights_only=True)
        shapes = content["param_shapes"][0]
        content["param_shapes"][0] = dict(reversed(shapes.items()))
        torch.save(content, file)
        return "the files disagree on where .* lies in the flat tensors"

    @staticmethod
    def progress_of_another_version(state: Path) -> str:
        (state.parent / "progress.json").write_text(json.dumps({"progress": {"steps": 1}}))
        return "progress.json: of another version"


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch /tmp/pipe-bomb-went-off",)


@pytest.mark.parametrize("damage", [name for name in vars(Damage) if not name.startswith("_")])
def test_what_is_damaged_or_strange_is_refused(
    damage: str, saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0], tmp_path / STEP)
    message = getattr(Damage, damage)(tmp_path / STEP / "state")
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / STEP)
    assert not Path("/tmp/pipe-bomb-went-off").exists()


def test_a_checkpoint_of_others_knows_its_step_alone(
    saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0] / "state", tmp_path / "global_step3")
    for where in (tmp_path, tmp_path / "global_step3"):
        if where == tmp_path:
            (tmp_path / "latest").write_text("global_step3")
        source = opened(where, samples=99)
        assert digest_of(source) == same(saved[1])
        assert source.progress == {
            "step": 3, "samples": 99, "tokens": 0, "skipped": 0, "metrics": {}, "origin": {},
        }  # fmt: skip


def test_before_the_first_update_there_are_weights_alone(tmp_path: Path) -> None:
    live = run_ranks(save_deepspeed, 1, str(tmp_path), Setting(wrap="zero1"), 0)[0]
    folder = tmp_path / "checkpoints" / "step-00000000"
    weights = digest_of(opened(folder, weights_only=True))
    assert {k: v for k, v in weights.items() if "/" in k} == {
        k: v for k, v in live.items() if k.startswith("weight/")
    }
