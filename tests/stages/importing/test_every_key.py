"""Every key that the installed tools know has a rule; one that a new version brings has none."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from stages.importing.accelerate import (
    ACCELERATE,
    ACCELERATE_ALL,
    DEEPSPEED_PLUGIN,
    DYNAMO_BLOCK,
    FSDP,
    FSDP_PREFIXED,
    PARALLELISM,
)
from stages.importing.deepspeed import AIO, BF16, DEEPSPEED, FP16
from stages.importing.rules import Table, judge
from stages.importing.trainer import DEFAULTS, TRAINER
from stages.importing.trainer_other import OTHER, TRAINER_ALL
from stages.importing.zero import ZERO
from stages.wrap.zero.config import KNOWN


def without_rule(keys: Iterable[str], table: Table) -> set[str]:
    return {*keys} - {*table}


def test_training_arguments() -> None:
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert without_rule(fields, {**TRAINER, **OTHER}) == set()
    # and no rule for what is no field any more, but among the older names
    assert {*TRAINER, *OTHER} - fields == OLD


OLD = {
    *("logging_dir", "include_tokens_per_second", "include_inputs_for_metrics"),
    *("per_gpu_eval_batch_size", "push_to_hub_model_id", "push_to_hub_organization"),
    *("push_to_hub_token", "overwrite_output_dir", "save_safetensors", "torchdynamo"),
}


def test_accelerator_config() -> None:
    from transformers.trainer_pt_utils import AcceleratorConfig

    table = TRAINER_ALL["accelerator_config"]
    assert isinstance(table, Mapping)
    fields = {field.name for field in dataclasses.fields(AcceleratorConfig)}
    assert without_rule(fields, table) == set()


def test_the_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    theirs = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    names = {
        "per_device": "per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "epochs": "num_train_epochs",
        "lr": "learning_rate",
        "schedule": "lr_scheduler_type",
    }
    for fact, value in DEFAULTS.items():
        assert theirs[names.get(fact, fact)] == value, fact
    assert theirs["save_total_limit"] is None  # so all checkpoints are kept


def test_accelerate_files() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    cluster = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert without_rule(cluster, ACCELERATE) == set()
    sagemaker = {field.name for field in dataclasses.fields(SageMakerConfig)}
    assert without_rule(sagemaker, ACCELERATE_ALL) == set()


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The launcher's options by group: what the blocks of a file are copied to."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    return {
        str(group.title): {
            action.dest for action in group._group_actions if action.dest != argparse.SUPPRESS
        }
        for group in parser._action_groups
    }


def every(options: Mapping[str, set[str]]) -> set[str]:
    return set().union(*options.values())


def test_accelerate_blocks(options: dict[str, set[str]]) -> None:
    assert without_rule(options["DeepSpeed Arguments"], DEEPSPEED_PLUGIN) == set()
    assert without_rule(options["FSDP Arguments"], FSDP_PREFIXED) == set()
    parallel = {key for key in every(options) if key.startswith("parallelism_config_")}
    assert parallel == {*PARALLELISM}
    dynamo = {key for key in every(options) if key.startswith("dynamo_")}
    assert dynamo == {*DYNAMO_BLOCK}


def test_fsdp_plugin() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert without_rule(fields, {**FSDP, "fsdp_version": FSDP["version"]}) == set()


def test_keys_of_the_fsdp_config_of_transformers() -> None:
    import transformers.training_args

    tree = ast.parse(Path(transformers.training_args.__file__).read_text("utf-8"))
    read = {
        node.slice.value if isinstance(node, ast.Subscript) else node.args[0].value  # type: ignore[attr-defined]
        for node in ast.walk(tree)
        if _reads_fsdp_config(node)
    }
    assert {"auto_wrap_policy", "min_num_params", "xla", "version"} <= read
    assert without_rule(read, FSDP) == set()


def _reads_fsdp_config(node: ast.AST) -> bool:
    """`self.fsdp_config["key"]`, `.get("key", ...)`, `.setdefault("key", ...)`."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) == "self.fsdp_config" and isinstance(
            node.slice, ast.Constant
        )
    calls = ("self.fsdp_config.get", "self.fsdp_config.setdefault")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in calls


def test_deepspeed() -> None:
    assert without_rule((key for key in KNOWN if "." not in key), DEEPSPEED) == set()


def test_what_deepspeed_has_removed() -> None:
    from deepspeed.runtime import config

    gone = {**config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    assert without_rule(gone, DEEPSPEED) == set()
    assert without_rule(config._REMOVED_ZERO_CONFIG_KEYS, ZERO) == set()
    for key in gone:
        rule = DEEPSPEED[key]
        assert callable(rule)
        assert judge(rule, {"enabled": True}).outcome == "refused"


def test_zero() -> None:
    for block, table in (("", ZERO), *((f"{b}.", ZERO[b]) for b in OFFLOADED)):
        assert isinstance(table, Mapping)
        place = f"zero_optimization.{block}"
        keys = {key.removeprefix(place) for key in KNOWN if key.startswith(place)}
        assert without_rule((key for key in keys if "." not in key), table) == set()


OFFLOADED = ("offload_optimizer", "offload_param")


def test_deepspeed_precision_and_disks() -> None:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.swap_tensor import constants

    assert without_rule(precision_config.DeepSpeedFP16Config.model_fields, FP16) == set()
    assert without_rule(precision_config.DeepSpeedBF16Config.model_fields, BF16) == set()
    disks = {
        value
        for name, value in vars(constants).items()
        if name.startswith("AIO_") and not name.endswith(("_DEFAULT", "_FORMAT"))
    }
    assert len(disks) >= 6
    assert without_rule(disks, AIO) == set()
