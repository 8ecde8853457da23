"""DeepSpeed's checkpoints: the live state is read from every kind, and loaded into DeepSpeed
again."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.checkpoint.formats import Reading, StateSource
from pipeline.contracts.optimizer import LossScaling
from pipeline.contracts.training import Progress
from pipeline.errors import CheckpointError
from stages.formats import stored
from stages.formats.deepspeed_native import ADMITTED, Fragment
from stages.formats.formats import Canonical, DeepSpeed
from tests.support.damage import Bomb, flip
from tests.support.formats import STEP, digest_of, load_universal, same, save_deepspeed
from tests.support.processes import run_ranks
from tests.support.state import Setting, load_run

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

FP16 = LossScaling(initial_scale=2.0**10, growth_interval=1000)
WORLDS: dict[int, dict[str, Setting]] = {
    1: {"3 alone": Setting(wrap="zero3")},
    2: {
        "2": Setting(wrap="zero2"),
        "2 round robin": Setting(wrap="zero2 round robin"),
        "2 offload fp16": Setting(wrap="zero2 offload", compute="fp16", loss_scaling=FP16),
    },
    3: {
        "1 bf16": Setting(wrap="zero1", compute="bf16"),
        "3 sub-groups": Setting(wrap="zero3 sub-groups", compute="bf16"),
    },
}
NAMES = [name for settings in WORLDS.values() for name in settings if "robin" not in name]


class Case(NamedTuple):
    """A checkpoint, the live state that was saved, and the number of ranks."""

    folder: Path
    live: dict[str, str]
    ranks: int
    setting: Setting


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Return a checkpoint after three steps for each kind of engine."""
    root = tmp_path_factory.mktemp("saved")
    found = {}
    for ranks, settings in WORLDS.items():
        live = run_ranks(save_deepspeed, ranks, str(root), settings)[0]
        for name, setting in settings.items():
            folder = root / name / STEP
            found[name] = Case(folder, live[name], ranks, setting)
    return found


@pytest.fixture
def saved(cases: dict[str, Case]) -> tuple[Path, dict[str, str]]:
    """Return ZeRO-2's checkpoint on two ranks, and the live state."""
    return cases["2"].folder, cases["2"].live


def opened(folder: Path, **reading: Any) -> StateSource:
    form = DeepSpeed()
    assert form.detect(folder)
    return form.open(folder, Reading(**reading))


@pytest.mark.parametrize("name", NAMES)
def test_the_live_state_comes_out(name: str, cases: dict[str, Case]) -> None:
    folder, live, ranks, setting = cases[name]
    source = opened(folder, samples=36)
    assert digest_of(source) == same(live)
    assert sum(key.startswith("exp_avg_sq/") for key in live) == 20
    assert (source.step, source.world_size, source.progress["samples"]) == (3, ranks, 36)
    assert [group.settings["weight_decay"] for group in source.state.groups] == [0.1, 0.0]
    assert [len(group.parameters) for group in source.state.groups] == [15, 5]
    assert (source.state.loss_scale is not None) == (setting.loss_scaling is not None)
    assert ("weight/counts" in source.tensors) == (ranks == 3)


def test_other_strategies_and_deepspeed_itself_load_what_was_converted(
    saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, live = saved
    source = opened(folder, samples=36)
    Canonical().write(source, tmp_path / "checkpoints" / STEP)
    loaded = run_ranks(load_run, 1, str(tmp_path), Setting(wrap="fsdp full"))[0]
    assert same(loaded["state"]) == same(live)
    assert loaded["progress"]["samples"] == 36

    canonical = Canonical().open(tmp_path / "checkpoints" / STEP, Reading())
    notes = DeepSpeed().write(canonical, tmp_path / "universal")
    assert any("the first optimizer group's hyperparameters" in note for note in notes)
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
        # DeepSpeed does not round frozen parameters; here they never changed.
        assert same(found["state"]) == same(live), wrap
        decays = found["decays"]
        assert decays == ([0.1, 0.1] if wrap.startswith("zero3") else [0.1, 0.0]), wrap
        stops = "`state_steps` argument must contain a list of singleton tensors"
        assert (stops if wrap == "zero3" else "goes on") in found["next"], wrap


def test_parameters_that_were_dealt_out_in_turn_are_refused(cases: dict[str, Case]) -> None:
    with pytest.raises(CheckpointError, match=r"disagree on where .*round_robin_gradients"):
        opened(cases["2 round robin"].folder)


MARK = "it-ran"
RANKS = tuple(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
MODEL, OTHER = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"


def reordered(state: Path) -> None:
    content = torch.load(state / MODEL, weights_only=True)
    shapes = content["param_shapes"][0]
    content["param_shapes"][0] = dict(reversed(shapes.items()))
    torch.save(content, state / MODEL)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "has the state of 1 ranks, 2 saved": lambda state: (state / RANKS[1]).unlink(),
    r"has a \*_optim_states.pt for the ranks \[1\]: incomplete": (
        lambda state: (state / RANKS[0]).unlink()
    ),
    r"has a \*_model_states.pt for the ranks \[\]: incomplete": (
        lambda state: (state / MODEL).unlink()
    ),
    "cannot be read": (
        lambda state: (state / RANKS[1]).write_bytes((state / RANKS[1]).read_bytes()[:-100])
    ),
    "damaged: the checksum of .* in it is wrong|cannot be read": (
        lambda state: flip(state / RANKS[1], (state / RANKS[1]).stat().st_size // 2)
    ),
    "refused: it holds posix.system, and reading that could run code": (
        lambda state: torch.save({"module": Bomb(state / MARK)}, state / MODEL)
    ),
    "latest: names no folder next to it": (
        lambda state: (state.parent / "latest").write_text("../../elsewhere")
    ),
    "tensor, pipeline or expert parallelism": (
        lambda state: shutil.copy(state / MODEL, state / OTHER)
    ),
    "the files disagree on where .* lies in the flat tensors": reordered,
    "progress.json: written by another version": (
        lambda state: (state.parent / "progress.json").write_text('{"progress": {"steps": 1}}')
    ),
}
"""Changes to a copy of a checkpoint, by the error that each gives."""


@pytest.mark.parametrize("message", DAMAGE)
def test_what_is_damaged_or_strange_is_refused(
    message: str, saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0], tmp_path / STEP)
    DAMAGE[message](tmp_path / STEP / "state")
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / STEP)
    assert not (tmp_path / STEP / "state" / MARK).exists()


def test_a_checkpoint_of_others_knows_its_step_alone(
    saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0] / "state", tmp_path / "global_step3")
    for where in (tmp_path, tmp_path / "global_step3"):
        if where == tmp_path:
            (tmp_path / "latest").write_text("global_step3")
        source = opened(where, samples=99)
        assert digest_of(source) == same(saved[1])
        assert source.progress == vars(Progress(step=3, samples=99))


def test_progress_and_random_streams_that_pipetrain_put_beside_them(
    saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """Our former stage for that format wrote them; its checkpoints still load."""
    folder = shutil.copytree(saved[0], tmp_path / STEP)
    progress = Progress(step=3, samples=36, tokens=100, lineage={"seed": 7})
    record = {"format": "deepspeed", "world_size": 2, "progress": vars(progress)}
    (folder / "progress.json").write_text(json.dumps(record))
    coded = base64.b64encode(bytes(range(9))).decode()
    (folder / "random-00001.json").write_text(json.dumps({"torch": coded}))
    source = opened(folder)
    assert source.progress == vars(progress)
    parts = source.read("random/00001/torch", 0, 9)
    assert b"".join(bytes(data) for _, data in parts) == bytes(range(9))


def test_the_loss_scale_is_left_out(cases: dict[str, Case], tmp_path: Path) -> None:
    source = opened(cases["2 offload fp16"].folder)
    notes = DeepSpeed().write(source, tmp_path / "universal")
    assert any("the loss scale, which starts again" in note for note in notes)
    back = opened(tmp_path / "universal")
    assert back.state.loss_scale is None
    live = cases["2 offload fp16"].live
    assert digest_of(back) == same(live) | {"loss_scale": "None"}


def test_before_the_first_update_there_are_weights_alone(
    saved: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / STEP)
    for file in (folder / "state").glob("zero_pp_*"):
        content = stored.load(file, ADMITTED)
        content["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
        torch.save(plain(content), file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # it is mapped
    with pytest.raises(CheckpointError, match=r"holds no optimizer state of .*--weights-only"):
        opened(folder)
    weights = digest_of(opened(folder, weights_only=True))
    assert {key: value for key, value in weights.items() if "/" in key} == {
        key: value for key, value in saved[1].items() if key.startswith("weight/")
    }


def plain(content: Any) -> Any:
    """Return what the inert stand-ins stand for."""
    from deepspeed.utils.tensor_fragment import fragment_address

    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items() if key != "loss_scaler"}
    if isinstance(content, list):
        return [plain(value) for value in content]
    if isinstance(content, Fragment):
        return fragment_address(numel=content.numel, start=content.start)
    return content
