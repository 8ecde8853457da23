"""`pipe plan` on recipes and on alternatives, and profiles on disk."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from memories.cases import Case, llama, own

from pipeline import Context, Data, Engine, TrainedRun
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import BUILT_IN, Entry, Registry
from pipeline.checkpoint.file_layout import PASSAGE
from pipeline.planning import memory_plan
from pipeline.planning.memory_plan import profile_of
from pipeline.planning.planner import Job, Planners
from tests.support.command import pipe
from tests.support.tier import spread

RECIPES = Path(__file__).parents[3] / "recipes"
FSDP = RECIPES / "llama8b_fsdp.yaml"
COPY = "copy for checkpoints"
PARAMETERS = 8_030_261_248
"""Parameters of Llama 3.1 8B."""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000,
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
}  # fmt: skip
CAVEATS = {
    "llama8b_1m_context.yaml": [
        "waiting for attention's exchanges: trainings with context parallelism that others "
        "published took 1.3 to 2 times as long as is expected of them"
    ],
}
MACHINE = ("--overhead", "0", "--host-memory", "8")


@functools.cache
def planned(*arguments: str | Path) -> dict[str, Any]:
    result = pipe("plan", "--json", *arguments)
    # pytest.fail: for nan and infinities, which JSON does not know
    record: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    assert result.exit_code == (0 if record["fits"] in (True, None) else 3)
    return record


def model(**config: Any) -> list[str]:
    """Return overrides that replace a recipe's model by a small one."""
    return ["model.path=null", "model.revision=null", f"model.config={json.dumps(LLAMA | config)}"]


def extended(folder: Path, stages: dict[str, Any]) -> Path:
    """Return the recipe with other slots."""
    recipe = {"extends": str(FSDP), "name": "extended", "stages": stages}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return folder / "recipe.yaml"


@pytest.mark.parametrize("recipe", spread(sorted(one.name for one in RECIPES.glob("llama*")), 3))
def test_every_recipe_can_be_planned(recipe: str) -> None:
    record = planned(RECIPES / recipe)
    phases = ["load", "forward and loss", "backward", "optimizer step", "checkpoint", "resume"]
    assert list(record["device"]) == phases
    assert list(record["host"]) == [*phases, "export"]
    assert record["caveats"] == CAVEATS.get(recipe, [])


def test_states_of_llama_8b_by_hand() -> None:
    """A share of 8 ranks: fp32 masters and gradients, two moments in fp32 (ZeRO, Rajbhandari et al.
    2020, with fp32 gradients)."""
    record = planned(FSDP)
    held, file = record["device"], record["storage"][0]
    share = 4 * PARAMETERS // 8
    assert held["checkpoint"]["items"] == {"parameters": share, "optimizer state": 2 * share}
    assert held["optimizer step"]["items"]["gradients"] == share
    assert held["load"]["bytes"] == share
    # two that are kept, and a third while it is written
    assert (file["what"], file["bytes"]) == ("3 checkpoints", 3 * 12 * PARAMETERS)


def test_an_average_takes_four_bytes_an_element(tmp_path: Path) -> None:
    average = {"wrap": {}, "average": {"use": "average.ema"}}
    before, after = planned(FSDP), planned(extended(tmp_path, average))
    more = [held["bytes"] - before["device"][at]["bytes"] for at, held in after["device"].items()]
    assert more == [0, *[4 * PARAMETERS // 8] * 5]
    assert after["host"]["checkpoint"]["items"][COPY] == 16 * PARAMETERS


@pytest.mark.full
def test_the_copy_for_checkpoints_is_there_once_the_model_is_loaded() -> None:
    """A host that is too small for the copy is too small from the first step on."""
    record = planned(FSDP, "--gpu", "H100", "--host-memory", "60")
    copies = [peak["items"].get(COPY, 0) for peak in record["host"].values()]
    assert copies == [0, *[12 * PARAMETERS] * 5, 0]
    assert record["short"] == {"host": "forward and loss"}
    # Data that waits for the disk, or is on the host, passes in bounded memory.
    for override in ("checkpoint.asynchronous=false", "wrap.cpu_offload=true"):
        assert planned(FSDP, override)["host"]["checkpoint"]["items"][COPY] == 8 * PASSAGE


def test_ranks_without_samples_and_other_processes_are_told() -> None:
    few = (FSDP, "train.global_batch_size=6", "train.micro_batch_size=1")
    assert "2 of 8 ranks idle: there is no sample for them in a step" in pipe("plan", *few).output
    assert planned(*few)["idle_ranks"] == 2
    told = "the recipe says 8 processes; planned for 16, as the options say"
    assert told in pipe("plan", FSDP, "--nodes", "2").output
    assert "the recipe says" not in pipe("plan", FSDP, "launch.procs=4").output


def test_a_recipe_for_cpus_on_gpus() -> None:
    given = ("plan", FSDP, *model(), "launch.procs=1", "precision.compute=fp32", "--gpus", "8")
    said = pipe(*given, "--gpu", "H100").stdout.splitlines()
    assert "the recipe says 1 process; planned for 8, as the options say" in said
    usual = "computes in fp32, as the recipe says; precision.compute={} is usual on GPUs"
    assert usual.format("bf16") in said
    assert usual.format("fp16") in pipe(*given, "--gpu", "V100").stdout.splitlines()
    assert "computes in" not in pipe("plan", FSDP, *model(), "--gpu", "H100").stdout


def test_a_host_of_which_nothing_was_said_is_a_condition() -> None:
    verdict = pipe("plan", FSDP, "--gpu", "H100").stdout.splitlines()[0]
    assert pipe("plan", FSDP, "--gpu", "H100", "--quiet").output.splitlines()[-1:] == [verdict]
    assert re.match(r"fits: [0-9.]+ GiB of 79.2 a GPU, if a host has [0-9.]+ GiB$", verdict)
    assert planned(FSDP)["fits"] is None


def test_rates_that_are_far_apart_are_numbers() -> None:
    machine = ("--gpu", "H100", "--nvme", "0.001", "--interconnect", "1000000", "--nodes", "2")
    record = planned(RECIPES / "llama70b_zero3_offload.yaml", *machine)
    assert 0 < record["seconds"]["least"] < record["seconds"]["expected"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plan", FSDP, "--out", "/dev/null/x"], "Not a directory"),
        (["advise", "Qwen/Qwen2.5-7B", "--gpus", "8"], "--gpu H100"),
        (["advise", "Qwen/Qwen2.5-7B", "--gpu", "H100"], "--gpus 8"),
    ],
)
def test_mistakes_are_told(arguments: list[str | Path], told: str) -> None:
    result = pipe(*arguments)
    assert (result.exit_code, told in result.output) == (2, True), result.output


def test_only_slots_without_a_planner_are_not_counted(tmp_path: Path) -> None:
    evaluate = {"use": "evaluate.lm", "files": str(RECIPES / "data" / "persuasion.txt")}
    recipe = extended(tmp_path, {"export": {}, "evaluate": evaluate})
    (caveat,) = planned(recipe)["caveats"]
    assert caveat == "slot `evaluate` (evaluate.lm) has no planner"
    assert f"not counted: {caveat}" in pipe("plan", recipe).stdout.splitlines()
    known = Registry.installed()
    ours = {one.name for one in known.entries() if one.distribution == BUILT_IN}
    free = {use for use in ours if getattr(known.load(use), "nothing_to_plan", False)}
    without = {"evaluate.lm", "wrap.accelerate", "train.hf_trainer", "optimizer.none"}
    assert ours - without - free == set(Planners.installed().names())


@dataclass(frozen=True, kw_only=True)
class TrainAlone:
    """Another training, with an engine and samples."""

    def run(self, ctx: Context, engine: Engine, data: Data) -> TrainedRun:
        raise AssertionError("never run")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a training without a planner."""
    mine = Entry(name="train.alone", value=f"{__name__}:TrainAlone", distribution="m", version="1")
    registry = Registry([*Registry.installed().entries(), mine])
    monkeypatch.setattr(Registry, "installed", lambda: registry)


@pytest.mark.usefixtures("alone")
def test_a_training_without_a_planner_is_not_counted_next_to_one_with(tmp_path: Path) -> None:
    """What is planned is the training with a planner, under the engine that it gets."""
    whole = planned(FSDP)
    stages = plan_file(FSDP, forecast=True).recipe.public()["stages"]
    slots: dict[str, Any] = {}
    for slot, fields in stages.items():
        if slot == "wrap":
            slots["first"] = {"use": "wrap.fsdp", "tensor_parallel": {"size": 2}}
            slots["alone"] = {"use": "train.alone"}
        slots[slot] = fields
    recipe = tmp_path / "two.yaml"
    launch = {"procs": 8, "device": "cuda"}
    recipe.write_text(json.dumps({"name": "two", "launch": launch, "stages": slots}))
    found = planned(recipe)
    assert found["caveats"] == ["slot `alone` (train.alone) has no planner"]
    assert (found["data_ranks"], found["step"]) == (whole["data_ranks"], whole["step"])
    assert found["device"] == whole["device"]
    shown = pipe("plan", recipe).stdout.splitlines()
    assert "not counted: slot `alone` (train.alone) has no planner" in shown


@pytest.mark.usefixtures("alone")
def test_a_third_training_without_a_planner_is_named(tmp_path: Path) -> None:
    stages = {"third": {"use": "wrap.ddp"}, "alone": {"use": "train.alone"}}
    both = {"extends": str(RECIPES / "two_trainings.yaml"), "name": "three", "stages": stages}
    recipe = tmp_path / "three.yaml"
    recipe.write_text(json.dumps(both))
    small = ["model.path=null", f"model.config={json.dumps(LLAMA)}"]
    found = planned(recipe, *small, "--gpu", "H100", *MACHINE)
    assert found["caveats"][-1] == "slot `alone` (train.alone) has no planner"
    assert {found["training"], *(one["training"] for one in found["others"])} == {"train", "chat"}


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("wrap.fsdp", "cannot be planned: slot `wrap` (wrap.fsdp) has no planner\n"),
        ("data.chat", "the length of samples: slot `data` (data.chat) has no planner"),
        (
            "optimizer.adamw",
            "slot `optimizer` (optimizer.adamw) has no planner, and slot `wrap` needs it "
            "(OptimizerShape)\n",
        ),
        ("train.causal_lm", "cannot be planned: slot `train` (train.causal_lm) has no planner\n"),
    ],
)
def test_a_slot_that_others_build_on_has_to_tell(
    use: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncounted = {use, "checkpoint.sharded", "export.safetensors"}
    entries = Planners.installed().entries()
    others = Planners(entry for entry in entries if entry.name not in uncounted)
    monkeypatch.setattr(Planners, "installed", lambda: others)
    said = pipe("plan", FSDP)
    assert (said.exit_code, why in said.output) == (2, True), said.output


def test_a_plan_warns_as_a_check_does() -> None:
    small = (*model(max_position_embeddings=63), "data.sequence_length=64")
    (warning,) = planned(FSDP, *small)["warnings"]
    assert "may have 64 tokens, and the model has 63 positions" in warning
    assert f"warning: {warning}" in pipe("plan", FSDP, *small).stdout.splitlines()


def test_an_adapter_that_is_exported_alone() -> None:
    fields = (*model(), "adapter.rank=8", "export={use: export.adapter, dtype: bf16}")
    record = planned(RECIPES / "llama70b_lora_fsdp.yaml", *fields)
    updates = 8 * 4 * (4 * (512 + 512) + 3 * (512 + 2048))
    (written,) = (file["bytes"] for file in record["storage"] if file["what"] == "export")
    assert written == 2 * updates
    block, root = 4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512, 2 * 1000 * 512 + 512
    proof = record["host"]["export"]["items"]["proof of the export"]
    assert proof == 4 * (root + block) + 2 * updates + (64 << 20)


def test_each_of_two_trainings_is_planned() -> None:
    """The one that needs most in full, whichever it is."""
    both = RECIPES / "two_trainings.yaml"
    small = ["model.path=null", f"model.config={json.dumps(LLAMA)}", "model.chat_template=null"]
    for most, other, of_most, of_other in (
        ("train", "chat", "novel", "tickets"), ("chat", "train", "tickets", "novel"),
    ):  # fmt: skip
        lengths = f"{of_most}.sequence_length=2048", f"{of_other}.sequence_length=64"
        fields = [*small, *lengths]
        record = planned(both, *fields, "--gpu", "H100", *MACHINE)
        assert record["training"] == most
        assert record["step"]["tokens"] == 8 * 2048
        (beside,) = record["others"]
        assert beside["training"] == other
        peak = max(sum(held["items"].values()) for held in record["device"].values())
        assert 0 < beside["device_bytes"] < peak
        assert {"train", "chat"} <= record["identity"]["stages"].keys()
        said = pipe("plan", both, *fields, "--gpu", "H100", *MACHINE).stdout
        assert f"this is the plan of `{most}`, the training that needs most" in said
        assert f"`{other}`: expected: " in said


CASE = Case(name="llama", model=own(**llama()), length=256, ranks=2)


def job(case: Case, folder: Path) -> Job:
    return Job.of(case.plan(folder), case.topology())


def test_a_profile_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPE_PROFILES", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(memory_plan, "_made", {})
    here = job(CASE, tmp_path)
    made = profile_of(here)
    (kept,) = (tmp_path / "not" / "there").iterdir()
    assert kept.stat().st_mode & 0o77 == 0
    # A damaged profile is made again.
    whole = kept.read_bytes()
    for damaged in (b"", b"{}", b"\xff", whole[:-9]):
        kept.write_bytes(damaged)
        monkeypatch.setattr(memory_plan, "_made", {})
        assert profile_of(here) == made
    assert kept.read_bytes() == whole
    monkeypatch.setattr(memory_plan, "_made", {})
    monkeypatch.setattr("pipeline.planning.trace.profiling.profile", None)
    assert profile_of(here) == made
    # Fields that decide how samples are cut, or what is saved, do not change a model's parts.
    others = (replace(CASE, samples=4, ranks=8, wrap="ddp"), replace(CASE, accumulation=3))
    assert [profile_of(job(case, tmp_path)) for case in others] == [made, made]
    for case in (replace(CASE, length=128), replace(CASE, compute="fp32"), replace(CASE, chunk=64)):
        with pytest.raises(TypeError, match="NoneType"):
            profile_of(job(case, tmp_path))
