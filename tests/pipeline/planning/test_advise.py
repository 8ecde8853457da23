"""The recipes that `pipe advise` writes, and remedies of plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import Result
from memories.cases import LLAMA_8B, LLAMA_70B

from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Registry
from pipeline.commands.advise import write_recipe
from pipeline.planning import search
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.shapes import Topology
from tests.support.command import pipe

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000,
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
}  # fmt: skip
MACHINE = ("--overhead", "0", "--host-memory", "8")


def planned(*arguments: str | Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(pipe("plan", "--json", *arguments).stdout)
    return record


def advise(folder: Path, *options: str) -> tuple[Result, Path]:
    """Run the command; return its result and the recipe's path."""
    (folder / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    out = folder / "advised.yaml"
    task = (folder / "config.json", "--seq", "128", "--micro-batch", "4", "--out", out)
    return pipe("advise", *task, *options), out


@pytest.mark.full
def test_low_rank_updates_are_told_where_nothing_else_fits(tmp_path: Path) -> None:
    result, recipe = advise(tmp_path, "--gpus", "1", "--memory", "0.1", *MACHINE)
    assert result.exit_code == 3
    assert "\nlow-rank updates (--lora) would fit with ddp " in result.output
    assert not recipe.exists()


def test_low_rank_updates_replace_all_weights_that_nobody_has_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    written = write_recipe(
        model=str(tmp_path / "config.json"), revision=None, data=None, lora=False,
        reason="its parameters are few", sequence=128, micro_batch=4, out=tmp_path / "x.yaml",
        machines=HardwareOptions(gpus=1, memory=0.1, host_memory=8), margins=Margins(overhead=0),
        registry=Registry.installed(),
    )  # fmt: skip
    recipe = yaml.safe_load(written.read_text("utf-8"))
    assert recipe["name"] == "x"  # that of the file that was asked for
    assert "adapter" in recipe["stages"]
    stages = recipe["stages"]
    assert stages["adapter"]["use"] == "adapter.lora"
    said = capsys.readouterr().out
    assert said.startswith("LoRA: all weights do not fit\n")
    assert "its parameters are few" not in said


def test_cpus_are_planned_for_without_gpus(tmp_path: Path) -> None:
    result, recipe = advise(tmp_path, "--host-memory", "8")
    assert " GiB of 8.0 a host\n" in result.output
    content = yaml.safe_load(recipe.read_text("utf-8"))
    compute = content["stages"]["precision"]["compute"]
    assert (content["launch"], compute) == ({"procs": 1, "device": "cpu"}, "fp32")


def test_what_is_advised_fits_and_every_remedy_is_one(tmp_path: Path) -> None:
    large = ("--gpus", "2", "--memory", "8", *MACHINE)
    result, recipe = advise(tmp_path, *large)
    assert result.output.startswith("chosen: ddp ")
    assert planned(recipe, *large)["fits"] is True
    small = ("--gpus", "2", "--memory", "0.2", *MACHINE)
    record = planned(recipe, *small)
    options = [remedy["options"] for remedy in record["remedies"]]
    assert options == [[], [], ["--gpus", "2", "--nodes", "2"]]
    for remedy in record["remedies"]:
        again = planned(recipe, *remedy["overrides"], *small, *remedy["options"])
        assert again["fits"] is True
        hosts = [held["bytes"] for held in again["host"].values()]
        assert remedy["host_bytes"] == max(hosts) < 8 << 30
        assert remedy["device_bytes"] <= 0.2 * (1 << 30)


def tried(
    patch: pytest.MonkeyPatch, recipe: str, *overrides: str, training: str = ""
) -> tuple[str, list[str]]:
    """Return the slot and the strategies that are tried for a recipe that does not fit."""
    plan = plan_file(Path(__file__).parents[3] / "recipes" / recipe, overrides, forecast=True)
    there, found = Topology(ranks=16, local_ranks=8, device="cuda"), list[Any]()
    told: Any = SimpleNamespace(plan=plan, training=training, topology=there)
    base: Any = SimpleNamespace(registry=Registry.installed())
    patch.setattr(search, "most_saving", lambda *_: SimpleNamespace(fits=False))
    patch.setattr(search, "on_more_nodes", lambda *_: None)
    patch.setattr(search, "choose", lambda *given: (found.extend(given[1:]), ([], []))[1])
    assert [*search.remedies(told, base)] == []
    return found[1], [one.name for one in found[0]]


@pytest.mark.parametrize(("training", "slot"), [("train", "wrap"), ("chat", "wrap_chat")])
def test_another_strategy_is_for_the_training_that_needs_most(
    training: str, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(monkeypatch, "two_trainings.yaml", training=training)[0] == slot


@pytest.mark.parametrize(
    ("wrap", "own"),
    [
        ({"use": "wrap.fsdp"}, "fsdp"),
        ({"use": "wrap.fsdp", "tensor_parallel": {"size": 2}}, "fsdp-tp2"),
        ({"use": "wrap.zero", "stage": 3, "offload_optimizer": {}}, "zero3-offload"),
    ],
)
def test_a_recipes_own_strategy_is_no_other(
    wrap: dict[str, Any], own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, names = tried(monkeypatch, "llama8b_fsdp.yaml", f"wrap={json.dumps(wrap)}")
    assert own not in names
    assert {"ddp", "fsdp-hybrid", "fsdp-tp4", "zero3-nvme"} <= {*names}


def advised(
    folder: Path, model: str, *training: str, network: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return what `pipe advise` says of H100s, and the plan of its recipe there."""
    recipe = folder / "recipe.yaml"
    machines = ("--gpus", "8", "--gpu", "H100", "--host-memory", "1500", *network)
    asked = ["advise", model, *machines, *training, "--out", str(recipe)]
    said = pipe(*asked)
    assert said.exit_code == 0, said.output
    planned = pipe("plan", recipe, *machines, "--json")
    return said.stdout, json.loads(planned.stdout)


@pytest.mark.full
def test_a_million_tokens_on_eight_gpus(tmp_path: Path) -> None:
    """Llama 8B: ranks share samples, since no other way fits."""
    said, plan = advised(tmp_path, LLAMA_8B, "--seq", str(1 << 20), "--global-batch", "8")
    assert said.startswith("chosen: fsdp-cp8 ")
    assert "data parallelism does not fit: " in said
    assert (plan["fits"], plan["data_ranks"]) == (True, 1)


@pytest.mark.full
def test_llama_70b_at_long_samples_offloads_nothing(tmp_path: Path) -> None:
    nodes = ("--nodes", "4", "--interconnect", "8x400g")
    said, plan = advised(tmp_path, LLAMA_70B, "--seq", "32768", network=nodes)
    assert said.startswith("chosen: fsdp-tp2 ")  # cp2 is faster, and leaves too little memory
    assert "\nfits too:\n  fsdp-cp2 " in said
    assert "offload" not in said.partition("\n")[0] + (tmp_path / "recipe.yaml").read_text("utf-8")
    assert plan["fits"] is True
    assert plan["copies"] == {"up": 0, "down": 0, "disk": 0}
