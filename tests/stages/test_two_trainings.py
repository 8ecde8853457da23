"""Two trainings in one recipe on two ranks: the second equals one that starts from the first's
export, bit for bit; the first engine's memory is given back; the files of both stay apart."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from transformers import AutoModelForCausalLM

from pipeline.chain.plan import plan_file
from pipeline.contracts.engine import Engine
from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.settings import ProcessCounts
from pipeline.execution.journal import Journal
from pipeline.execution.run_spec import Step, steps_of
from pipeline.execution.run_state import RunState
from pipeline.execution.runner import Runner
from stages.consolidate.stream import open_weights
from tests.support.processes import run_ranks
from tests.support.recipes import run_recipe
from tests.support.runs import context
from tests.support.tiny_recipe import EXPORT, write
from tests.support.two_trainings import CHATS, LORA, TEXT, begin, one, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the recipes."""
    return write_files(tmp_path_factory.mktemp("files"))


def measured(run: Path, training: str) -> list[dict[str, Any]]:
    """Return what the steps of a training measured, without times."""
    names = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
    found = RunState.of(records(run / "metrics.jsonl")).trainings[training].records
    return [{name: each[name] for name in names} for each in found if "loss" in each]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    opened = open_weights(str(checkpoint))
    return {name: opened.read(name) for name in opened.names()}


@pytest.mark.parametrize(
    ("first", "second", "adapter", "dtype"),
    [
        ("wrap.ddp", "wrap.fsdp", None, "bf16"),
        ("wrap.fsdp", "wrap.ddp", LORA, "fp32"),
        pytest.param("wrap.zero", "wrap.fsdp", None, "source", marks=pytest.mark.full),
        pytest.param(
            "wrap.fsdp", "wrap.zero", {**LORA, "dora": True}, "bf16", marks=pytest.mark.full
        ),
    ],
)
def test_the_second_equals_one_that_starts_from_an_export_of_the_first(
    folder: Path, tmp_path: Path, first: str, second: str, adapter: Any, dtype: str
) -> None:
    start = one(TEXT, first, 3)
    further = one(CHATS, second, 4, "2")
    export = {**EXPORT, "export": {**EXPORT["export"], "dtype": dtype}}
    trained = {"trained": {"use": "model.trained", "dtype": dtype}}
    alone = {name: write(folder / f"{name}.yaml", stages) for name, stages in {
        "both": begin("./model", adapter) | start | trained | further | export,
        "first": begin("./model", adapter) | start | export,
        "second": begin(str(tmp_path / "first" / "export")) | further | export,
    }.items()}  # fmt: skip
    for name, recipe in alone.items():
        (tmp_path / name).mkdir()
        run_ranks(run_recipe, 2, str(recipe), str(tmp_path / name))
    both, before, after = (tmp_path / name for name in alone)
    assert measured(both, "") == measured(before, "")
    assert measured(both, "train2") == measured(after, "")
    mine = weights(both / "checkpoints-train2" / "step-00000004")
    theirs = weights(after / "checkpoints" / "step-00000004")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    # the second has trained: its weights are not the first's
    loaded = AutoModelForCausalLM.from_pretrained(before / "export").state_dict()
    assert not any(torch.equal(mine[name].to(t.dtype), t) for name, t in loaded.items())
    files = ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
    for file in files:
        assert (both / "export" / file).read_bytes() == (after / "export" / file).read_bytes()


class Watching(Runner):
    """Looks after each slot at what is left of the engines before it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.engines: dict[str, list[weakref.ref[Any]]] = {}
        self.alive: dict[str, int] = {}

    def _run_slot(self, step: Step) -> None:
        self.alive[f"bytes in {step.slot}"] = bytes_of_tensors()
        self.alive[f"groups in {step.slot}"] = len(distributed_c10d._world.pg_map)
        for slot, held in self.engines.items():
            self.alive[f"{slot} in {step.slot}"] = sum(each() is not None for each in held)
        super()._run_slot(step)
        made = self.artifacts.get(step.slot)
        if isinstance(made, Engine):
            modules = [each for module in made.parts for each in module.modules()]
            parameters = [each for module in modules for each in module.parameters()]
            held = [made, *modules, *parameters]
            self.engines[step.slot] = [weakref.ref(each) for each in held]


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors of this process, views counted once."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage()
        for each in tensors
        if each.device.type == "cpu" and type(each) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storage.nbytes() for storage in storages.values())


def watch(dist: DistContext, recipe: str, folder: str) -> dict[str, int]:
    """Run the recipe; return how many objects of each engine were alive when each slot began."""
    plan = plan_file(recipe, started=ProcessCounts(procs=dist.world_size))
    with contextlib.ExitStack() as stack:
        ctx = context(dist, folder, plan.recipe.seed)
        ctx.on_exit = stack.callback
        runner = Watching(steps_of(plan), ctx, Journal(Path(folder) / "journal.jsonl"))
        stack.callback(runner.close)
        runner.run([step.slot for step in runner.steps], {})
        gc.collect()
        return runner.alive


@pytest.mark.parametrize(
    "wrap", ["wrap.ddp", "wrap.fsdp", pytest.param("wrap.zero", marks=pytest.mark.full)]
)
def test_the_first_engine_s_memory_is_given_back_before_the_second(
    folder: Path, tmp_path: Path, wrap: str
) -> None:
    slots = one(TEXT, wrap, 2) | {"trained": {"use": "model.trained"}} | one(CHATS, wrap, 2, "2")
    recipe = write(folder / f"memory-{wrap}.yaml", begin("./model") | slots)
    for alive in run_ranks(watch, 2, str(recipe), str(tmp_path)):
        assert alive["wrap in train"] > 20
        for slot in ("trained", "data2", "wrap2", "train2"):
            assert alive[f"wrap in {slot}"] == 0
        assert alive["wrap2 in train2"] > 20
        assert alive["groups in train2"] == alive["groups in train"]  # none closes before the end
        before, first, second = (alive[f"bytes in {slot}"] for slot in ("wrap", "train", "wrap2"))
        assert first - before > 100_000  # of the model's 115 KB, sharded or not, with its gradients
        assert second - before < 4_000
