"""Whatever `pipe import` writes with exit code 0, `pipe check` accepts.

Values that need a GPU are left out: `pipe check` says so of them on another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.stages.importing.support import config
from tests.support.command import pipe
from tests.support.tier import times

ROWS = {
    "alpaca": {"instruction": "a b", "input": "", "output": "c"},
    "chat": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "text": {"text": "a b c"},
}
TOOLS = ("script", "axolotl", "llama_factory", "torchtune")
COMPONENT = "torchtune.training.metric_logging."


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return files of rows, by their form."""
    folder = tmp_path_factory.mktemp("rows")
    for form, row in ROWS.items():
        (folder / f"{form}.jsonl").write_text(f"{json.dumps(row)}\n" * 8, encoding="utf-8")
    return {form: str(folder / f"{form}.jsonl") for form in ROWS}


def base(tool: str, model: Path, rows: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe of the tool that is right."""
    script = {"model_name_or_path": str(model), "output_dir": "x", "learning_rate": 1e-4}
    if tool == "script":
        return {**script, "train_file": rows["text"]}
    if tool == "axolotl":
        return {"base_model": str(model), "learning_rate": 1e-4, "sequence_len": 16,
                "datasets": [{"path": rows["alpaca"], "type": "alpaca"}]}  # fmt: skip
    if tool == "llama_factory":
        mine = {"dataset": "mine", "dataset_dir": {"mine": {"file_name": rows["alpaca"]}}}
        return {**script, **mine, "stage": "sft", "finetuning_type": "full", "do_train": True}
    published = config("torchtune/lora.yaml")
    model_block = {"_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_rank": 4,
                   "lora_alpha": 8, "lora_attn_modules": ["q_proj"]}  # fmt: skip
    kept = {key: published[key] for key in ("loss", "epochs", "batch_size")}
    return {**kept, **of_torchtune(published, model, rows), "model": model_block,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4}}  # fmt: skip


def of_torchtune(
    published: Mapping[str, Any], model: Path, rows: Mapping[str, str]
) -> dict[str, Any]:
    """Return the blocks of a recipe of torchtune that name a model and data of this machine."""
    data = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "json",
            "data_files": rows["text"], "packed": True}  # fmt: skip
    checkpointer = {**published["checkpointer"], "checkpoint_dir": str(model)}
    tokenizer = {**published["tokenizer"], "max_seq_len": 16}
    return {"checkpointer": checkpointer, "dataset": data, "tokenizer": tokenizer}


def written(folder: Path, content: Mapping[str, Any], *more: Any) -> tuple[Result, Path]:
    """Import a configuration; return what was said, and the recipe that is written."""
    file, recipe = folder / "config.yaml", folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(dict(content)), encoding="utf-8")
    recipe.unlink(missing_ok=True)
    return pipe("import", file, "-o", recipe, *more), recipe


def drawn(tool: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw up to seven keys with one of their values."""
    tables = config("drawn.yaml")
    trainer, values = tables["trainer"], {} if tool == "script" else tables[tool]
    if tool == "axolotl":
        trainer = {key: trainer[key] for key in tables["axolotl of trainer"]}
    values = {**({} if tool == "torchtune" else trainer), **values, **tables.get(tool, {})}
    keys = st.lists(st.sampled_from(sorted(values)), max_size=7, unique=True)
    return keys.flatmap(
        lambda chosen: st.fixed_dictionaries({key: st.sampled_from(values[key]) for key in chosen})
    )


@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=times(quick=20, full=1500), deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(data=st.data())
def test_what_is_imported_without_a_word_is_right(
    tool: str, model: Path, rows: dict[str, str], tmp_path: Path, data: st.DataObject
) -> None:
    content = {**base(tool, model, rows), **data.draw(drawn(tool))}
    procs = data.draw(st.sampled_from([1, 2, 4, 6]))
    said, recipe = written(tmp_path, content, "--procs", procs)
    event(f"exit code {said.exit_code}")
    assert said.exit_code in (0, 2, 3), said.output
    assert recipe.exists() == (said.exit_code != 2)
    if said.exit_code == 0:
        checked = pipe("check", recipe)
        assert checked.exit_code == 0, f"{checked.output}\n{recipe.read_text('utf-8')}"


@pytest.mark.parametrize("tool", TOOLS[1:])
def test_a_published_recipe_for_this_machine_is_right(
    tool: str, model: Path, rows: dict[str, str], tmp_path: Path
) -> None:
    published = config(f"{tool}/lora.yaml")
    here = {
        "axolotl": {"attn_implementation": "sdpa", **{key: base("axolotl", model, rows)[key] for key
                    in ("base_model", "datasets", "sequence_len")}},
        "llama_factory": {
            "model_name_or_path": str(model), "dataset": "mine", "trust_remote_code": False,
            "dataset_dir": {"mine": {"file_name": rows["chat"], "formatting": "sharegpt"}},
            "cutoff_len": 16,
        },
    }.get(tool) or of_torchtune(published, model, rows)  # fmt: skip
    said, recipe = written(tmp_path, {**published, **here}, "--procs", 2)
    assert said.exit_code == (0 if tool == "torchtune" else 3), said.output
    adapted = ["launch.device=cpu", "precision.compute=fp32", "optimizer.moments=master"]
    if tool == "torchtune":
        adapted += ["precision.master=fp32", "precision.reduce=fp32"]
    checked = pipe("check", recipe, *adapted)
    assert checked.exit_code == 0, checked.output


def test_weights_that_are_to_be_filled_in_are_not_right_yet(model: Path, tmp_path: Path) -> None:
    blocks = [{"path": f"owner/{name}", "type": "alpaca"} for name in ("one", "two")]
    content = {"base_model": str(model), "learning_rate": 1e-4, "datasets": blocks}
    said, recipe = written(tmp_path, content, "--procs", 2)
    assert "fill in data.sources.weight: " in said.stderr
    checked = pipe("check", recipe)
    assert checked.exit_code == 2
    assert "weight" in checked.stderr


TRACKED: Mapping[str, Mapping[str, Any]] = {
    "trainer": {
        "output_dir": "x", "per_device_train_batch_size": 2, "report_to": ["wandb", "tensorboard"],
        "run_name": "one", "logging_dir": "logs", "learning_rate": 1e-4, "max_steps": 2,
    },
    "axolotl": {
        "base_model": "a/b", "micro_batch_size": 1, "learning_rate": 1e-4, "max_steps": 2,
        "wandb_project": "p", "wandb_mode": "offline", "use_mlflow": True,
        "mlflow_tracking_uri": "./runs", "use_trackio": True, "use_tensorboard": True,
    },
    "llama_factory": {
        "stage": "pt", "finetuning_type": "full", "model_name_or_path": "a/b", "max_steps": 2,
        "per_device_train_batch_size": 2, "learning_rate": 1e-4, "report_to": "trackio",
        "project": "p",
    },
    "torchtune": {
        "batch_size": 2, "max_steps_per_epoch": 2, "epochs": 1, "tokenizer": {"max_seq_len": 8},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "metric_logger": {"_component_": f"{COMPONENT}WandBLogger", "project": "p", "tags": ["a"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("tool", TRACKED)
def test_a_recipe_with_trackers_is_right(tool: str, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("a b c a b b c a\n" * 40, "utf-8")
    said, recipe = written(tmp_path, TRACKED[tool], "--model", model, "--data", data, "--procs", 2)
    assert said.exit_code == 0, said.output
    checked = pipe("check", recipe, "launch.device=cpu")
    assert checked.exit_code == 0, checked.output
