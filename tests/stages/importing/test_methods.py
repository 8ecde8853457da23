"""The purpose and method of a training are never lost: files of other tools, adapters, losses,
parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UsageError
from pipeline.importing.translator import ConfigFile, choose
from stages.importing.reader import TABLES
from stages.importing.rules import Table
from stages.importing.tools import KEYS
from stages.importing.translator import HuggingFace
from tests.stages.importing.support import left_out, outcome, slot, translated

DPO = {"output_dir": "x", "model_name_or_path": "org/model", "beta": 0.1, "learning_rate": 5e-7}


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        (DPO, "TRL for preference or reinforcement learning"),
        ({"output_dir": "x", "num_generations": 8, "learning_rate": 1e-6}, "TRL for preference"),
        ({"output_dir": "x", "train_type": "lora", "learning_rate": 1e-4}, "ms-swift"),
        ({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1}, "peft"),
        ({"architectures": ["X"], "model_type": "llama", "torch_dtype": "bfloat16"}, "a model"),
    ],
)
def test_a_file_of_another_tool_is_refused_by_name(content: dict[str, Any], tool: str) -> None:
    file = ConfigFile(path=Path("c.yaml"), content=content)
    with pytest.raises(UsageError, match=rf"c\.yaml: is a file of {tool}") as caught:
        choose([file], [HuggingFace()])
    assert "TrainingArguments" in str(caught.value)


def test_a_file_of_mostly_unknown_keys_is_none_that_is_read() -> None:
    content = {"learning_rate": 1e-4, "one": 1, "two": 2}
    with pytest.raises(UsageError, match="its keys do not show which kind of configuration it is"):
        choose([ConfigFile(path=Path("c.yaml"), content=content)], [HuggingFace()])


def test_no_key_of_another_tool_is_one_that_is_read() -> None:
    def keys(table: Table) -> set[str]:
        return {*table}

    for table in TABLES.values():
        assert not set().union(*KEYS.values()) & keys(table)


@pytest.mark.parametrize(
    "key", ["lora_x", "adapter_path", "freeze_layers", "quantization", "tp_size", "dpo_beta"]
)
def test_an_unknown_key_that_may_change_the_method_leaves_no_recipe(key: str) -> None:
    made = translated({"output_dir": "x", "learning_rate": 1e-4, "seed": 1, key: 4})
    assert made.recipe is None
    assert left_out(made) == {key: "may change the training method"}
    assert translated({"output_dir": "x", "seed": 1, "my_key": 4}).recipe is not None


FSDP_ALONE = "accelerate takes it with FSDP alone"


@pytest.mark.parametrize("kind", ["NO", "MULTI_GPU", "DEEPSPEED", "FSDP"])
@pytest.mark.parametrize(
    ("key", "kinds", "wrap", "why"),
    [
        ("dp_replicate_size", ["FSDP"], {"sharding": "hybrid_shard"}, FSDP_ALONE),
        ("tp_size", ["FSDP"], {"tensor_parallel": {"size": 2}}, FSDP_ALONE),
        ("cp_size", ["FSDP"], {"context_parallel": {"size": 2}}, FSDP_ALONE),
        (
            "sp_size", ["DEEPSPEED"], {"stage": 2, "context_parallel": {"size": 2}},
            "accelerate takes it with DeepSpeed alone",
        ),
    ],
)  # fmt: skip
def test_sizes_of_parallelism_count_whatever_the_type(
    kind: str, key: str, kinds: list[str], wrap: dict[str, Any], why: str
) -> None:
    block = {f"parallelism_config_{key}": 2}
    made = translated({"distributed_type": kind, "parallelism_config": block})
    if kind in kinds:
        assert {name: slot(made, "wrap")[name] for name in wrap} == wrap
        assert left_out(made) == {}
    else:
        assert made.recipe is None
        assert left_out(made) == {f"parallelism_config.parallelism_config_{key}": why}


def test_megatron_is_refused_whatever_the_type() -> None:
    block = {"megatron_lm_tp_degree": 2}
    made = translated({"distributed_type": "FSDP", "megatron_lm_config": block})
    assert made.recipe is None


@pytest.mark.parametrize(
    ("said", "loss"),
    [
        ({"assistant_only_loss": True}, "completion"),
        ({"assistant_only_loss": True, "completion_only_loss": False}, "assistant"),
        ({"completion_only_loss": True, "assistant_only_loss": True}, "completion"),
        ({"completion_only_loss": False}, "all"),
    ],
)
def test_tokens_that_are_trained_on(said: dict[str, Any], loss: str) -> None:
    made = translated({"output_dir": "x", "dataset_name": "owner/chats", **said})
    assert not left_out(made)
    assert slot(made, "data")["loss"] == loss


def test_tokens_that_are_trained_on_are_asked_for_where_trl_looks_at_the_rows() -> None:
    said = {"output_dir": "x", "dataset_name": "owner/chats", "assistant_only_loss": False}
    found = outcome(translated(said), "assistant_only_loss")
    assert (found.outcome, found.hint) == ("refused", "set data.loss: all or completion")
    text = {**said, "assistant_only_loss": True, "block_size": 8}
    assert "assistant_only_loss" in left_out(translated(text))


def test_which_tokens_are_trained_on_is_asked_where_no_key_says_it(tmp_path: Path) -> None:
    assert "data.loss" in translated({"output_dir": "x", "dataset_name": "owner/chats"}).missing
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    rows = {"output_dir": "x", "train_file": str(tmp_path / "rows.jsonl")}
    assert "data.loss" in translated(rows).missing
    made = translated({**rows, "completion_only_loss": False})
    assert "data.loss" not in made.missing
    assert slot(made, "data")["loss"] == "all"


def test_what_trl_s_own_config_leaves_out_is_trl_s_default() -> None:
    def parts(**said: Any) -> tuple[Any, ...]:
        made = translated({"output_dir": "x", **said})
        assert not left_out(made)
        precision, optimizer = slot(made, "precision"), slot(made, "optimizer")
        model, train = slot(made, "model"), slot(made, "train")
        return (precision["compute"], optimizer["lr"], train.get("log_every"),
                model.get("activation_checkpointing"))  # fmt: skip

    assert parts(packing=True) == ("bf16", 2e-5, 10, {})
    assert parts(learning_rate=None) == ("fp32", 5e-5, None, None)
    other = {"bf16": False, "learning_rate": 1e-4, "gradient_checkpointing": False}
    assert parts(packing=True, logging_steps=5, **other) == ("fp32", 1e-4, 5, None)
    assert parts(packing=False, fp16=True)[0] == "fp16"


def test_rows_that_trl_splits_are_left_out() -> None:
    made = translated({"output_dir": "x", "packing": True, "packing_strategy": "bfd_split"})
    assert left_out(made) == {"packing_strategy": "is always bfd in a recipe"}


def test_products_in_8_bits_are_the_model_s() -> None:
    made = translated({"distributed_type": "FSDP", "mixed_precision": "fp8"})
    assert made.recipe is None
    assert "model.fp8" in outcome(made, "mixed_precision").hint
    beside = translated(
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "fp8_config": {"backend": "AO"}}
    )
    assert beside.recipe is not None
    assert outcome(beside, "fp8_config").hint == "set model.fp8 in the recipe"


def test_an_older_name_of_fsdp_s_prefetching_is_known() -> None:
    block = {"fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_version": 1}
    made = translated({"distributed_type": "FSDP", "fsdp_config": block})
    assert not left_out(made)
