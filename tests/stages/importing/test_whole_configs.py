"""Whole configurations, as people have them: imported, checked, and trained for two steps.

Features of GPUs only, and sizes that a tiny model is too small for, are overridden on the command
line (`ADAPTED`), as a person would do; the files are not changed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from tests.stages.importing.configs.tools import write_with_tools
from tests.stages.importing.support import from_files, left_out
from tests.support.command import pipe
from tests.support.processes import run_ranks
from tests.support.recipes import run_recipe
from tests.support.tier import spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

ADAPTED = (
    "launch.procs=2", "launch.device=cpu",  # two processes of this machine
    "precision.compute=fp32",  # narrow floats are emulated on many CPUs
    "train.steps=2", "train.global_batch_size=4", "train.micro_batch_size=1",
    "train.accumulation=null", "data.sequence_length=8",
)  # fmt: skip
"""Overrides of every run here."""


class Case(NamedTuple):
    """Files, further overrides, and the keys that the recipe lacks."""

    files: tuple[str, ...]
    adapted: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


CHAT = (
    "chat_template", "dataset_mixture", "push_to_hub", "torch_dtype",
)  # fmt: skip
NO_TRACKERS = ("track_tensorboard=null", "track_mlflow=null")
NO_EPOCHS = ("train.epochs=null",)
SDPA = ("model.attention=sdpa",)
"""Overrides instead of flash_attention_2, which needs a GPU."""
CHAT_ADAPTED = (*NO_EPOCHS, *SDPA, *NO_TRACKERS, "data.heldout_fraction=0.2")
CASES = {
    "basic": Case(("launch/basic.json",)),
    "ddp": Case(("launch/ddp.yaml",)),
    "fsdp1": Case(("launch/fsdp1.yaml",)),
    "fsdp1 without processes": Case(("launch/fsdp1_without_processes.yaml",)),
    "fsdp2": Case(("launch/fsdp2.yaml",)),
    "plugin": Case(("launch/plugin.yaml",)),
    "plugin that names a file": Case(("launch/plugin_file.yaml", "engines/stage1_torch_adam.json")),
    "one process": Case(("launch/one_process.yaml",), (), ("command",)),
    "zero1": Case(("engines/stage1_numbers.json",)),
    "zero2": Case(("engines/stage2_numbers.json",)),
    "zero2 auto": Case(("engines/stage2_auto.json",)),
    "zero3": Case(("engines/stage3_numbers.json",)),
    "zero3 offload": Case(("engines/stage3_offload.json",)),
    "script": Case(("trainer/script.yaml",), NO_EPOCHS),
    "arguments": Case(("trainer/arguments.json",), NO_EPOCHS),
    "sharded arguments": Case(("trainer/sharded_arguments.json",)),
    "arguments that name a file": Case(
        ("trainer/names_an_engine.json", "engines/stage2_auto.json")
    ),
    "chat": Case(("trainer/chat.yaml",), CHAT_ADAPTED, CHAT),
    "chat with fsdp2": Case(("trainer/chat.yaml", "launch/fsdp2.yaml"), CHAT_ADAPTED, CHAT),
    "chat with zero3 auto": Case(
        ("trainer/chat.yaml", "engines/stage3_auto.json"),
        CHAT_ADAPTED,
        (*CHAT, "lr_scheduler_type"),
    ),
}

TRAINED = spread(list(CASES), 5)

EXPORTED = [CASES[name] for name in ("ddp", "fsdp1", "zero2 auto")]
TRAINED_ONLY = ("consolidate=null", "export=null", "checkpoint.asynchronous=false")
"""Overrides that end a run after its training, for all configurations except EXPORTED."""


@pytest.fixture(scope="module")
def files(configs: Path) -> Path:
    """Write the configurations written by hand and by the tools."""
    run_ranks(write_with_tools, 1, str(configs))
    return configs


def run_recipes(
    dist: DistContext, jobs: list[tuple[str, list[str], str]]
) -> list[list[dict[str, Any]]]:
    """Run whole recipes on this rank, one after the other; return the records of the steps of
    each."""
    logged = []
    for recipe, adapted, folder in jobs:
        run_recipe(dist, recipe, folder, adapted)
        logged.append(list(records(Path(folder) / "metrics.jsonl")))
    return logged


def imported(case: Case, files: Path, model: Path, folder: Path) -> tuple[str, list[str], str]:
    """Run `pipe import` on a case in its folder; return recipe, overrides and run folder. It must
    succeed."""
    text, recipe, run = folder / "text.txt", folder / "recipe.yaml", folder / "run"
    run.mkdir(parents=True)
    text.write_text("a b c a b b c a\n" * 40, encoding="utf-8")
    arguments = ["import", *(str(files / file) for file in case.files), "-o", str(recipe)]
    said = pipe(*arguments, "--model", model, "--data", text)
    unfinished = any(
        line.startswith(("fill in ", "pipe check: ")) for line in said.stderr.split("\n")
    )
    assert said.exit_code == (3 if case.left_out or unfinished else 0), said.output
    adapted = [*ADAPTED, f"data.cache={folder}", *case.adapted]
    return str(recipe), adapted if case in EXPORTED else [*adapted, *TRAINED_ONLY], str(run)


@pytest.fixture(scope="module")
def jobs(files: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("imported")
    return {name: imported(case, files, model, root / name) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def trained(jobs: dict[str, Any]) -> dict[str, Any]:
    """Return the records of every case. All run in the same two processes, because starting them
    takes longest."""
    logged = run_ranks(run_recipes, 2, [jobs[name] for name in TRAINED], limit=600)[0]
    return dict(zip(TRAINED, logged, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_whole_configuration_is_imported_and_right(
    name: str, files: Path, jobs: dict[str, Any]
) -> None:
    recipe, adapted, _ = jobs[name]
    assert set(left_out(from_files(files, *CASES[name].files))) == {*CASES[name].left_out}
    checked = pipe("check", recipe, *adapted)
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("name", TRAINED)
def test_a_whole_configuration_trains(
    name: str, jobs: dict[str, Any], trained: dict[str, Any]
) -> None:
    losses = [record["loss"] for record in trained[name] if "loss" in record]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(131), abs=0.5)  # loss of a random model
    export = Path(jobs[name][2]) / "export" / "model.safetensors"
    assert export.is_file() == (CASES[name] in EXPORTED)
