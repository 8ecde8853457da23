"""The purpose and method of a training are never lost: files of other tools, adapters, losses,
parallelism."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UsageError
from pipeline.importing.translator import ConfigFile, choose, installed_translators
from stages.importing.axolotl import translator as axolotl
from stages.importing.llama_factory import translator as llama_factory
from stages.importing.reader import TABLES
from stages.importing.tools import AXOLOTL, LLAMA_FACTORY, TOOLS, advice_on, tool_of
from stages.importing.translator import HuggingFace
from tests.stages.importing.support import imported, left_out, outcome, slot, translated

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
    assert str(caught.value).endswith(")")  # a hint


OTHERS: dict[str, list[dict[str, Any]]] = {
    "open-instruct": [
        {"model_name_or_path": "a/b", "gradient_checkpointing": True, "tokenizer_name": "a/b",
         "dataset_mixer": {"a/prefs": 1.0}, "use_slow_tokenizer": False, "max_seq_length": 2048,
         "per_device_train_batch_size": 1, "learning_rate": 5e-7, "num_epochs": 1,
         "output_dir": "output/dpo_7b", "with_tracking": True, "loss_type": "dpo_norm", "beta": 5},
        {"model_name_or_path": "a/b", "dataset_name": "a/prefs", "max_seq_length": 2048,
         "learning_rate": 5e-7, "num_train_epochs": 3, "output_dir": "output/x",
         "checkpointing_steps": 1000, "keep_last_n_checkpoints": 3},
        {"model_name_or_path": "a/b", "dataset_mixer_list": ["a/b", "1.0"], "num_epochs": 2,
         "learning_rate": 5e-6, "output_dir": "x"},
    ],
    "LLaMA-Factory v1": [
        {"model": "a/b", "model_class": "llm", "template": "qwen3_nothink", "cutoff_len": 2048,
         "peft_config": {"name": "lora", "r": 16}, "dist_config": {"name": "fsdp2"},
         "train_dataset": "data/dpo.yaml", "output_dir": "x", "micro_batch_size": 1,
         "learning_rate": 1e-5, "max_steps": 10},
        {"model": "a/b", "train_dataset": "d.yaml", "output_dir": "x", "micro_batch_size": 1,
         "cutoff_len": 2048, "learning_rate": 1e-4},
    ],
    "alignment-handbook": [
        {"model_name_or_path": "a/b", "dataset_mixer": {"a/b": 1.0}, "dataset_splits": ["train"],
         "bf16": True, "learning_rate": 2e-5, "num_train_epochs": 1, "output_dir": "data/x"},
    ],
    "litgpt": [
        {"checkpoint_dir": "checkpoints/a/b", "out_dir": "out/lora", "precision": "bf16-true",
         "devices": 1, "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True,
         "data": {"class_path": "litgpt.data.Alpaca2k"}, "train": {"save_interval": 200},
         "seed": 1337},
        {"model_name": "pythia-14m", "out_dir": "out", "seed": 42, "devices": "auto",
         "train": {"global_batch_size": 512, "micro_batch_size": 4, "max_tokens": 3_000_000}},
    ],
    "nanotron": [
        {"checkpoints": {"checkpoint_interval": 10}, "general": {"project": "x", "seed": 42},
         "parallelism": {"dp": 2, "pp": 2, "tp": 2}, "optimizer": {"zero_stage": 0},
         "tokens": {"micro_batch_size": 2, "train_steps": 15}},
    ],
    "gpt-neox": [
        {"pipe_parallel_size": 0, "model_parallel_size": 2, "num_layers": 12, "hidden_size": 768,
         "optimizer": {"type": "Adam", "params": {"lr": 6e-4}}, "gradient_clipping": 1.0,
         "zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 4,
         "fp16": {"enabled": True}, "train_iters": 320000},
        {"checkpoint-factor": 100, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
    ],
    "fairseq2": [
        {"dataset": {"train_split": "train", "batch_size": 16, "family": "llama"},
         "regime": {"num_steps": 100, "checkpoint_every_n_steps": 10}},
    ],
    "Lightning": [
        {"seed_everything": 42, "trainer": {"max_epochs": 3}, "optimizer": {"lr": 1e-3}},
    ],
    "NeMo": [
        {"trainer": {"devices": 8}, "exp_manager": {"name": "x"},
         "model": {"micro_batch_size": 1, "global_batch_size": 8}},
        {"step_scheduler": {"global_batch_size": 64}, "model": {"_target_": "nemo_automodel.X"}},
    ],
    "verl": [
        {"data": {"train_files": "x.parquet"}, "actor_rollout_ref": {"model": {"path": "a"}},
         "trainer": {"total_epochs": 3}},
        {"model": {"partial_pretrain": "a/b"}, "data": {"train_batch_size": 256},
         "trainer": {"total_epochs": 3}},
    ],
    "ms-swift": [
        {"model": "a/b", "tuner_type": "lora", "lora_rank": 8, "template": "qwen", "seed": 42},
        {"model": "a/b", "rlhf_type": "dpo", "beta": 0.1, "learning_rate": 1e-4},
    ],
    "Megatron": [{"tensor_model_parallel_size": 2, "seed": 1, "micro_batch_size": 1}],
    "AutoTrain": [{"base_model": "a/b", "task": "llm-sft", "project_name": "x"}],
    "mergekit": [{"merge_method": "linear", "base_model": "a/b", "models": [{"model": "c/d"}]}],
    "TRL for preference or reinforcement learning": [
        {"model_name_or_path": "a/b", "output_dir": "x", "reward_funcs": ["r"], "bf16": True},
        {"model_name_or_path": "a/b", "output_dir": "x", "max_prompt_length": 512, "bf16": True,
         "dataset_mixture": {"datasets": [{"id": "a/b"}]}, "beta": 0.01},
    ],
}  # fmt: skip
"""Tool -> keys of files that it has in its repository (or in its documentation)."""


@pytest.mark.parametrize("tool", OTHERS)
def test_files_of_other_tools_are_refused_with_what_to_do(tool: str) -> None:
    translators = installed_translators()
    for content in OTHERS[tool]:
        file = ConfigFile(path=Path("c.yaml"), content=content)
        with pytest.raises(UsageError, match=rf"is a file of {re.escape(tool)},") as caught:
            choose([file], translators)
        assert advice_on(tool) in str(caught.value)


def test_a_single_common_word_makes_no_tool() -> None:
    words = ("num_epochs", "micro_batch_size", "val_set_size", "template", "lora_rank",
             "cutoff_len", "base_model", "stage", "dataset_dir", "sequence_len")  # fmt: skip
    for word in words:
        assert tool_of({word: 1, "learning_rate": 1e-4, "output_dir": "x"}) is None


NAMED = {"model_name_or_path": "a/b", "learning_rate": 5e-7, "num_train_epochs": 1}


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"output_dir": "data/zephyr-7b-dpo-full"}, "output_dir"),
        ({"output_dir": "x", "run_name": "KTO run 3"}, "run_name"),
        ({"output_dir": "x", "loss_type": "sigmoid"}, "loss_type"),
        ({"output_dir": "x", "do_predict": True}, "do_predict"),
        ({"output_dir": "x", "do_train": False, "do_eval": True}, "do_eval"),
        ({"output_dir": "x", "predict_with_generate": True}, "predict_with_generate"),
        ({"output_dir": "x", "dataset_mixture": {"datasets": [{"columns": ["chosen"]}]}},
         "dataset_mixture"),
    ],
)  # fmt: skip
def test_what_is_no_training_on_text_is_not_made_one(said: dict[str, Any], key: str) -> None:
    found = translated({**NAMED, **said})
    assert found.recipe is None
    assert key in left_out(found)


@pytest.mark.parametrize(
    "said",
    [
        {"output_dir": "adopt"}, {"output_dir": "runs/sft-for-grpo"}, {"output_dir": "input"},
        {"output_dir": "x", "do_train": True, "do_predict": True},
        {"output_dir": "x", "do_eval": True}, {"output_dir": "x", "do_train": False},
        {"output_dir": "x", "do_train": False, "do_eval": True, "eval_strategy": "steps"},
    ],
)  # fmt: skip
def test_what_is_one_stays_one(said: dict[str, Any]) -> None:
    assert translated({**NAMED, **said}).recipe is not None


def test_a_prediction_of_llama_factory_is_no_training() -> None:
    predict = {"model_name_or_path": "a/b", "stage": "sft", "finetuning_type": "lora",
               "template": "llama3", "cutoff_len": 2048, "output_dir": "x"}  # fmt: skip
    for switch in ("do_predict", "do_eval", "predict_with_generate"):
        found = imported(llama_factory.LlamaFactory(), {**predict, switch: True})
        assert found.recipe is None
        assert switch in left_out(found)


def test_a_file_of_mostly_unknown_keys_is_none_that_is_read() -> None:
    content = {"learning_rate": 1e-4, "one": 1, "two": 2}
    with pytest.raises(UsageError, match="its keys do not show which kind of configuration it is"):
        choose([ConfigFile(path=Path("c.yaml"), content=content)], [HuggingFace()])


def test_no_keys_of_another_tool_are_among_those_that_are_read() -> None:
    names = [tool.name for tool in TOOLS]
    read = {AXOLOTL: axolotl.TABLE, LLAMA_FACTORY: llama_factory.TABLE}
    for tool in TOOLS:
        for sign in tool.signs:
            for table in TABLES.values():
                assert not sign <= {*table}, (tool.name, sign)
            for name, keys in read.items():  # an earlier tool wins
                earlier = names.index(tool.name) < names.index(name)
                assert not (earlier and sign <= {*keys}), (tool.name, sign, name)


@pytest.mark.parametrize(
    "key", ["lora_x", "adapter_path", "freeze_layers", "quantization", "tp_size", "dpo_beta"]
)
def test_an_unknown_key_that_may_change_the_method_leaves_no_recipe(key: str) -> None:
    made = translated({"output_dir": "x", "learning_rate": 1e-4, "seed": 1, key: 4})
    assert made.recipe is None
    assert left_out(made) == {key: "may change the training method"}
    assert translated({"output_dir": "x", "seed": 1, "my_key": 4}).recipe is not None


FSDP_ALONE = "accelerate takes it only with FSDP"


@pytest.mark.parametrize("kind", ["NO", "MULTI_GPU", "DEEPSPEED", "FSDP"])
@pytest.mark.parametrize(
    ("key", "kinds", "wrap", "why"),
    [
        ("dp_replicate_size", ["FSDP"], {"sharding": "hybrid_shard"}, FSDP_ALONE),
        ("tp_size", ["FSDP"], {"tensor_parallel": {"size": 2}}, FSDP_ALONE),
        ("cp_size", ["FSDP"], {"context_parallel": {"size": 2}}, FSDP_ALONE),
        (
            "sp_size", ["DEEPSPEED"], {"stage": 2, "context_parallel": {"size": 2}},
            "accelerate takes it only with DeepSpeed",
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
