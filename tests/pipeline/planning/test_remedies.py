"""What `pipe plan` says would make a recipe fit, and the recipe that `pipe advise` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.cli import main

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000,
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
}  # fmt: skip
MACHINE = ("--overhead", "0", "--host-memory", "8")


def pipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def advise(folder: Path, *options: str) -> tuple[Result, Path]:
    """What comes of it, and where the recipe is written to."""
    (folder / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    (folder / "tokenizer.json").write_text("{}", "utf-8")
    out = folder / "advised.yaml"
    model = (folder / "config.json", "--seq", "128", "--micro-batch", "4", "--out", out)
    return pipe("advise", *model, *options), out


def test_low_rank_updates_are_told_where_nothing_else_fits(tmp_path: Path) -> None:
    result, recipe = advise(tmp_path, "--gpus", "1", "--memory", "0.1", *MACHINE)
    assert result.exit_code == 3
    assert "\nlow-rank updates (--lora) would fit with ddp " in result.output
    assert not recipe.exists()


def test_cpus_are_planned_for_without_gpus(tmp_path: Path) -> None:
    result, recipe = advise(tmp_path, "--host-memory", "8")
    assert " GiB of 8.0 a host\n" in result.output
    content = yaml.safe_load(recipe.read_text("utf-8"))
    assert content["launch"] == {"procs": 1, "device": "cpu"}
    assert content["stages"]["precision"]["compute"] == "fp32"


@pytest.mark.parametrize(
    ("options", "hint"), [(("--gpus", "8"), "--gpu H100"), (("--gpu", "H100"), "--gpus 8")]
)
def test_gpus_are_said_whole(options: tuple[str, ...], hint: str) -> None:
    result = pipe("advise", "Qwen/Qwen2.5-7B", *options)
    assert result.exit_code == 2
    assert hint in result.output


def test_what_is_advised_fits_and_every_remedy_is_one(tmp_path: Path) -> None:
    large = ("--gpus", "2", "--memory", "8", *MACHINE)
    result, recipe = advise(tmp_path, *large)
    assert result.output.splitlines()[0].startswith("chosen: ddp ")
    assert pipe("plan", recipe, *large).exit_code == 0
    machine = ("--memory", "0.2", *MACHINE)
    record = json.loads(pipe("plan", "--json", recipe, "--gpus", "2", *machine).output)
    assert record["fits"] is False
    options: list[Any] = [remedy["options"] for remedy in record["remedies"]]
    assert options == [[], [], ["--gpus", "2", "--nodes", "2"]]
    for remedy in record["remedies"]:
        gpus = remedy["options"] or ["--gpus", "2"]
        again = pipe("plan", "--json", recipe, *remedy["overrides"], *gpus, *machine)
        told = json.loads(again.output)
        assert told["fits"] is True
        fullest = max(held["bytes"] for held in told["host"].values())
        assert remedy["host_bytes"] == fullest < 8 << 30
        assert remedy["device_bytes"] <= 0.2 * (1 << 30)
