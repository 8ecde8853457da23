"""Trackers of other tools become slots, with their settings and without their secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.importing.translator import Translation
from stages.importing.axolotl.translator import Axolotl
from stages.importing.llama_factory.translator import LlamaFactory
from stages.importing.torchtune.translator import Torchtune
from tests.stages.importing.support import imported, left_out, outcome, outcomes, translated

AXOLOTL = {"base_model": "a/b", "micro_batch_size": 1}
LLAMA_FACTORY = {"stage": "pt", "finetuning_type": "full", "model_name_or_path": "a/b"}
COMPONENT = "torchtune.training.metric_logging."


def slots(found: Translation) -> dict[str, Any]:
    """Return the slots of trackers."""
    assert found.recipe is not None
    stages = found.recipe["stages"]
    return {name: stages[name] for name in stages if name.startswith("track")}


def arguments(**values: Any) -> Translation:
    """Translate TrainingArguments."""
    return translated({"output_dir": "x", **values})


def torchtune(**block: Any) -> Translation:
    """Translate a recipe of torchtune with this logger."""
    block["_component_"] = COMPONENT + block["_component_"]
    return imported(Torchtune(), {"batch_size": 2, "metric_logger": block})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"report_to": "wandb"}, {"track": {"use": "track.wandb"}}),
        ({"report_to": ["tensorboard"]}, {"track": {"use": "track.tensorboard"}}),
        (
            {"report_to": ["wandb"], "run_name": "first try/2"},
            {"track": {"use": "track.wandb", "name": "first try/2"}},
        ),
        (
            {"report_to": "tensorboard", "logging_dir": "/runs/logs", "run_name": "mine"},
            {"track": {"use": "track.tensorboard", "folder": "/runs/logs"}},
        ),
        (
            {"report_to": "trackio", "project": "chat", "trackio_space_id": "me/runs"},
            {"track": {"use": "track.trackio", "project": "chat", "space": "me/runs"}},
        ),
        (
            {"report_to": ["mlflow", "wandb"], "run_name": "mine", "wandb_entity": "us"},
            {
                "track_wandb": {"use": "track.wandb", "entity": "us", "name": "mine"},
                "track_mlflow": {"use": "track.mlflow", "name": "mine"},
            },
        ),
        ({"log_with": "wandb"}, {"track": {"use": "track.wandb"}}),
    ],
)
def test_arguments_of_the_trainer(values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = arguments(**values)
    assert slots(found) == expected
    assert left_out(found) == {}
    assert set(outcomes(found)) == {"output_dir", *values}


@pytest.mark.parametrize("value", ["none", ["none"], [], None, ""])
def test_no_tracker(value: Any) -> None:
    found = arguments(report_to=value, project="huggingface", logging_dir="/x", run_name="n")
    assert slots(found) == {}
    assert left_out(found) == {}
    assert outcome(found, "project").why == "has no effect with the other settings"


def test_trackers_of_others_are_named() -> None:
    found = arguments(report_to=["comet_ml", "wandb", "clearml"])
    assert slots(found) == {"track": {"use": "track.wandb"}}
    assert outcome(found, "report_to").to == {"track.use": "track.wandb"}
    assert left_out(found) == {
        "report_to": "recipes have no tracker comet_ml, clearml; "
        "metrics.jsonl in the run folder has it all"
    }


def test_all_trackers_are_those_that_are_installed_somewhere() -> None:
    found = arguments(report_to="all")
    assert slots(found) == {}
    assert outcome(found, "report_to").outcome == "not translated"
    assert outcome(found, "report_to").hint == "name them: report_to: [wandb]"


def test_a_slot_stands_before_train_and_its_values_name_their_keys() -> None:
    found = arguments(report_to="wandb", run_name="mine")
    assert found.recipe is not None
    names = [*found.recipe["stages"]]
    assert names.index("track") == names.index("train") - 1
    assert found.recipe["name"] == "mine"
    assert outcome(found, "run_name").to == {"name": "mine", "track.name": "mine"}
    assert found.notes["stages", "track", "use"] == "report_to in 0.json"
    assert found.notes["stages", "track", "name"] == "run_name in 0.json"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"wandb_project": "mine", "wandb_entity": "us", "wandb_name": "one",
             "wandb_mode": "dryrun", "wandb_run_group": "lora"},
            {"track": {"use": "track.wandb", "project": "mine", "entity": "us", "name": "one",
                       "mode": "offline", "group": "lora"}},
        ),
        ({"use_wandb": True}, {"track": {"use": "track.wandb"}}),
        ({"wandb_entity": "us"}, {}),
        ({"wandb_project": "mine", "wandb_mode": "disabled"}, {}),
        (
            {"mlflow_tracking_uri": "http://x:5000", "mlflow_experiment_name": "chat",
             "mlflow_run_name": "one"},
            {"track": {"use": "track.mlflow", "tracking_uri": "http://x:5000",
                       "experiment": "chat", "name": "one"}},
        ),
        ({"mlflow_tracking_uri": "http://x:5000"}, {}),
        (
            {"use_tensorboard": True, "trackio_project_name": "p", "trackio_run_name": "r",
             "trackio_space_id": "me/runs", "use_trackio": True},
            {"track_tensorboard": {"use": "track.tensorboard"},
             "track_trackio": {"use": "track.trackio", "project": "p", "name": "r",
                               "space": "me/runs"}},
        ),
        ({"use_wandb": False, "wandb_watch": "", "wandb_log_model": None}, {}),
    ],
)  # fmt: skip
def test_axolotl(values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(Axolotl(), {**AXOLOTL, **values})
    assert slots(found) == expected
    assert left_out(found) == {}
    assert set(outcomes(found)) == {*AXOLOTL, *values}


def test_what_axolotl_sends_besides_is_not_translated() -> None:
    values = {
        "use_wandb": True, "wandb_watch": "gradients", "wandb_log_model": "end",
        "wandb_run_id": "a1", "use_comet": True, "comet_project_name": "x",
        "use_swanlab": True, "hf_mlflow_log_artifacts": True,
    }  # fmt: skip
    found = imported(Axolotl(), {**AXOLOTL, **values})
    assert {*left_out(found)} == {*values} - {"use_wandb"}
    assert left_out(found)["use_comet"] == (
        "recipes do not have this tracker; metrics.jsonl in the run folder has it all"
    )


def test_llama_factory_reports_like_the_trainer() -> None:
    values = {"report_to": "wandb", "run_name": "one", "use_swanlab": True, "swanlab_project": "x"}
    found = imported(LlamaFactory(), {**LLAMA_FACTORY, **values})
    assert slots(found) == {"track": {"use": "track.wandb", "name": "one"}}
    assert {*left_out(found)} == {"use_swanlab", "swanlab_project"}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {"_component_": "WandBLogger", "project": "p", "entity": "us", "group": "g",
             "name": "one", "tags": ["a", "b"], "log_dir": "/x"},
            {"track": {"use": "track.wandb", "project": "p", "entity": "us", "group": "g",
                       "name": "one", "tags": ["a", "b"]}},
        ),
        (
            {"_component_": "TensorBoardLogger", "log_dir": "/logs", "organize_logs": True},
            {"track": {"use": "track.tensorboard", "folder": "/logs"}},
        ),
        ({"_component_": "DiskLogger", "log_dir": "/logs", "filename": "a.txt"}, {}),
        ({"_component_": "StdoutLogger"}, {}),
    ],
)  # fmt: skip
def test_torchtune(block: dict[str, Any], expected: dict[str, Any]) -> None:
    found = torchtune(**block)
    assert slots(found) == expected
    assert {key for key in outcomes(found) if key.startswith("metric_logger")} == {
        f"metric_logger.{key}" for key in block
    }
    assert not any(key.startswith("metric_logger") for key in left_out(found))


def test_other_loggers_of_torchtune_are_not_translated() -> None:
    found = torchtune(_component_="CometLogger", project="p", workspace="us")
    assert slots(found) == {}
    assert {key for key in left_out(found) if key.startswith("metric_logger")} == {
        "metric_logger._component_"
    }
    wandb = torchtune(_component_="WandBLogger", project="p", run_id="a1", magic=True)
    assert {key for key in left_out(wandb) if key.startswith("metric_logger")} == {
        "metric_logger.run_id", "metric_logger.magic",
    }  # fmt: skip


SECRET = "do-not-write-me"


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        ({"wandb_api_key": SECRET}, "wandb_api_key", "set WANDB_API_KEY in the environment"),
        (
            {"mlflow_tracking_uri": f"https://me:{SECRET}@host", "use_mlflow": True},
            "mlflow_tracking_uri", "set MLFLOW_TRACKING_URI in the environment",
        ),
        (
            {"mlflow_tracking_uri": f"https://host?token={SECRET}", "use_mlflow": True},
            "mlflow_tracking_uri", "set MLFLOW_TRACKING_URI in the environment",
        ),
    ],
)  # fmt: skip
def test_secrets_are_refused_and_not_said(
    values: dict[str, Any], key: str, hint: str, tmp_path: Path
) -> None:
    found = imported(Axolotl(), {**AXOLOTL, **values})
    assert outcome(found, key).outcome == "refused"
    assert outcome(found, key).hint == hint
    file, recipe = tmp_path / "axolotl.json", tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**AXOLOTL, **values}), "utf-8")
    said = pipe("import", file, "-o", recipe)
    assert said.exit_code == 3
    assert SECRET not in said.output + recipe.read_text("utf-8")


def test_no_logger_of_torchtune_gives_its_key_away() -> None:
    found = torchtune(_component_="CometLogger", api_key=SECRET)
    assert SECRET not in repr((found.recipe, found.outcomes))


def pipe(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


BATCH = {"per_device_train_batch_size": 2, "max_steps": 2}
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "trainer": {
        "output_dir": "x", "learning_rate": 1e-4, **BATCH, "report_to": ["wandb", "tensorboard"],
        "run_name": "one", "logging_dir": "logs",
    },
    "axolotl": {
        **AXOLOTL, "learning_rate": 1e-4, "max_steps": 2, "wandb_project": "p",
        "wandb_mode": "offline", "use_mlflow": True, "mlflow_tracking_uri": "./runs",
        "use_trackio": True, "use_tensorboard": True,
    },
    "llama_factory": {
        **LLAMA_FACTORY, **BATCH, "learning_rate": 1e-4, "report_to": "trackio", "project": "p",
    },
    "torchtune": {
        "batch_size": 2, "max_steps_per_epoch": 2, "epochs": 1,
        "tokenizer": {"max_seq_len": 8},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "metric_logger": {
            "_component_": f"{COMPONENT}WandBLogger", "project": "p", "tags": ["a"],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_a_recipe_with_trackers_passes_its_check(tool: str, model: Path, tmp_path: Path) -> None:
    file, recipe, data = (tmp_path / name for name in ("file.json", "recipe.yaml", "text.txt"))
    file.write_text(json.dumps(TOOLS[tool]), "utf-8")
    data.write_text("a b c a b b c a\n" * 40, "utf-8")
    said = pipe("import", file, "--model", model, "--data", data, "--procs", 2, "-o", recipe)
    assert said.exit_code == 0, said.output
    checked = pipe("check", recipe, "launch.device=cpu")
    assert checked.exit_code == 0, checked.output
