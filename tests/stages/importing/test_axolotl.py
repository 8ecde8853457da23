"""axolotl's recipes: published ones, and each key whose meaning differs from the Trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UsageError
from pipeline.importing.translator import ConfigFile, Translation
from stages.importing.axolotl.translator import Axolotl
from tests.stages.importing.configs.axolotl import FULL, LORA, QLORA
from tests.stages.importing.support import (
    assert_fields,
    by_outcome,
    imported,
    left_out,
    outcome,
    outcomes,
    slot,
)

BASE = {"base_model": "org/model", "learning_rate": 1e-4, "datasets": [{"path": "a/b"}]}


def made(**said: Any) -> Translation:
    return imported(Axolotl(), {**BASE, **said}, procs=2)


def test_a_published_lora_recipe() -> None:
    found = imported(Axolotl(), LORA, procs=2)
    assert found.recipe == {
        "name": "lora-out",
        "launch": {"procs": 2},
        "seed": 42,
        "stages": {
            "model": {
                "use": "model.hf", "path": "NousResearch/Llama-3.2-1B",
                "activation_checkpointing": {},
                "attention": "flash_attention_2",
            },
            "adapter": {
                "use": "adapter.lora", "rank": 16, "alpha": 32.0, "dropout": 0.05,
                "targets": LORA["lora_target_modules"],
            },
            "precision": {"use": "precision.policy", "compute": "bf16"},
            "data": {
                "use": "data.chat", "form": "alpaca", "template": False, "loss": "assistant",
                "sources": [
                    {"dataset": "teknium/GPT4-LLM-Cleaned"}
                ],
                "heldout_fraction": 0.1, "packing": True, "sequence_length": 2048,
                "too_long": "drop",
            },
            "optimizer": {
                "use": "optimizer.adamw", "lr": 0.0002, "moments": "8bit", "schedule": "cosine",
                "warmup_ratio": 0.1, "weight_decay": 0.0,
            },
            "wrap": {"use": "wrap.ddp"},
            "checkpoint": {"use": "checkpoint.sharded", "every": "1 epoch", "keep": 4},
            "train": {
                "use": "train.causal_lm", "epochs": 1.0, "eval_every": "0.25 epochs",
                "eval_first": True, "global_batch_size": 8, "micro_batch_size": 2, "log_every": 1,
            },
            "consolidate": {"use": "consolidate.stream"},
            "export": {"use": "export.safetensors"},
        },
    }  # fmt: skip
    assert found.missing == {}
    assert left_out(found) == {
        "loss_watchdog_threshold": "a run ends at a loss that is not finite, or at a spike",
    }


def test_the_outcome_of_every_key_of_a_published_recipe() -> None:
    found = by_outcome(imported(Axolotl(), LORA, procs=2))
    off = {key for key in LORA if key.startswith("wandb_")} | {"lora_model_dir"}
    assert found == {
        "default": off | {
            "eval_sample_packing", "tf32", "resume_from_checkpoint", "loss_watchdog_patience",
            "special_tokens.pad_token",
        },
        "refused": {"loss_watchdog_threshold"},
        "translated": {
            "saves_per_epoch", "evals_per_epoch",
            "base_model", "datasets[0].path", "datasets[0].type", "val_set_size", "output_dir",
            "adapter", "sequence_len", "sample_packing", "lora_r", "lora_alpha", "lora_dropout",
            "lora_target_modules", "gradient_accumulation_steps", "micro_batch_size", "num_epochs",
            "optimizer", "lr_scheduler", "learning_rate", "bf16", "gradient_checkpointing",
            "logging_steps", "attn_implementation", "warmup_ratio", "weight_decay",
        },
    }  # fmt: skip


def test_a_published_recipe_with_weights_in_4_bits() -> None:
    found = imported(Axolotl(), QLORA, procs=1)
    assert slot(found, "adapter") == {
        "use": "adapter.lora", "quantize": "nf4", "rank": 32, "alpha": 16.0, "dropout": 0.05,
        "targets": QLORA["lora_target_modules"],
    }  # fmt: skip
    assert slot(found, "train")["global_batch_size"] == 8
    assert outcome(found, "load_in_4bit").to == {"adapter.quantize": "nf4"}
    assert outcomes(found)["load_in_8bit"] == "default"


def test_a_published_recipe_for_all_weights_with_fsdp() -> None:
    found = imported(Axolotl(), FULL, procs=4)
    assert slot(found, "wrap") == {
        "use": "wrap.fsdp", "units": ["LlamaDecoderLayer"], "cpu_offload": True,
        "sharding": "full_shard",
    }  # fmt: skip
    assert slot(found, "data") == {
        "use": "data.chat", "form": "sharegpt", "loss": "assistant", "heldout_fraction": 0.02,
        "sources": [
            {"dataset": "mlabonne/FineTome-100k", "split": "train[:20%]"}
        ],
        "packing": True, "sequence_length": 4096, "too_long": "drop",
    }  # fmt: skip
    assert slot(found, "model")["kernels"] == "liger"
    # axolotl means FSDP1 without a version, which makes masters in fp32
    assert slot(found, "precision") == {"use": "precision.policy", "compute": "bf16"}
    assert set(left_out(found)) == {"chat_template", "special_tokens.eos_token"}
    assert outcome(found, "chat_template").why == (
        "rows are laid out by the tokenizer's own chat template"
    )
    assert outcomes(found)["plugins"] == "default"


def test_what_a_recipe_leaves_out_is_as_in_axolotl() -> None:
    found = made()
    assert slot(found, "data") == {
        "use": "data.chat", "loss": "assistant", "sequence_length": 512, "too_long": "drop",
        "sources": [{"dataset": "a/b"}],
    }  # fmt: skip
    assert slot(found, "optimizer") == {
        "use": "optimizer.adamw", "kernel": "fused", "lr": 1e-4, "schedule": "cosine",
        "warmup_ratio": 0.03, "weight_decay": 0.0,
    }  # fmt: skip
    assert slot(found, "train") == {
        "use": "train.causal_lm", "epochs": 1.0, "global_batch_size": 2, "micro_batch_size": 1,
    }  # fmt: skip
    assert slot(found, "precision") == {
        "use": "precision.policy", "compute": "bf16", "master": "bf16",
    }  # fmt: skip
    assert slot(found, "checkpoint") == {"use": "checkpoint.sharded", "keep": 4}
    assert found.recipe is not None
    assert found.recipe["seed"] == 42
    warmup = found.notes["stages", "optimizer", "warmup_ratio"]
    assert warmup == "axolotl's default, which is 100 steps at most"


@pytest.mark.parametrize(
    ("said", "compute", "master"),
    [
        ({"bf16": True}, "bf16", "bf16"),
        ({"bf16": "full"}, "bf16", "bf16"),
        ({"bf16": False}, "fp32", None),
        ({"bf16": None}, "fp32", None),
        ({"fp16": True}, "fp16", None),
        ({"fp16": True, "bf16": "auto"}, "fp16", None),
        ({"bf16": True, "fsdp_config": {"fsdp_version": 2}}, "bf16", "bf16"),
        ({"bf16": True, "fsdp_version": 1, "fsdp_config": {"offload_params": True}}, "bf16", None),
        ({"bf16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, "bf16", None),
        ({"adapter": "lora", "lora_r": 8, "lora_alpha": 8}, "bf16", None),
    ],
)
def test_dtypes(said: dict[str, Any], compute: str, master: str | None) -> None:
    precision = slot(made(**said), "precision")
    assert (precision["compute"], precision.get("master")) == (compute, master)


@pytest.mark.parametrize(
    ("block", "data"),
    [
        ({"path": "a/b", "type": "alpaca"}, {"form": "alpaca", "template": False}),
        ({"path": "a/b", "type": "chat_template"}, {"form": "messages"}),
        (
            {"path": "a/b", "type": "chat_template", "field_messages": "conversations",
             "roles": {"user": ["human", "user"], "assistant": ["gpt", "assistant"]},
             "roles_to_train": ["assistant"], "train_on_eos": "turn"},
            {"form": "sharegpt"},
        ),
        ({"path": "a/b", "name": "en", "split": "test", "revision": "f" * 40},
         {"sources": [{"dataset": "a/b", "config": "en", "split": "test", "revision": "f" * 40}]}),
        ({"path": "a/b", "type": "completion", "field": "body"},
         {"use": "data.text", "text_key": "body", "documents_apart": True}),
    ],
)  # fmt: skip
def test_data_sets(block: dict[str, Any], data: dict[str, Any]) -> None:
    found = made(datasets=[block])
    assert left_out(found) == {}
    assert {key: slot(found, "data").get(key) for key in data} == data
    if slot(found, "data")["use"] == "data.text":
        assert not slot(found, "data").keys() & {"loss", "too_long", "packing"}


def test_files_of_data(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    blocks: list[dict[str, Any]] = [
        {"path": str(tmp_path / "rows.jsonl"), "type": "alpaca"},
        {"path": "json", "data_files": ["/x/one.jsonl", "/x/two.jsonl"], "type": "alpaca"},
        {"path": str(tmp_path / "folder"), "type": "alpaca", "ds_type": "json"},
    ]
    found = made(datasets=blocks, test_datasets=[{"path": "/x/held.jsonl", "type": "alpaca"}],
                 val_set_size=0)  # fmt: skip
    assert slot(found, "data")["files"] == [
        f"{tmp_path}/rows.jsonl", "/x/one.jsonl", "/x/two.jsonl", f"{tmp_path}/folder/*",
    ]  # fmt: skip
    assert slot(found, "data")["heldout_files"] == ["/x/held.jsonl"]
    assert left_out(found) == {}


def test_data_sets_of_the_hub_are_weighted_by_the_user() -> None:
    blocks = [{"path": "a/b", "type": "alpaca"}, {"path": "/c.jsonl", "type": "alpaca"}]
    found = made(datasets=blocks)
    assert slot(found, "data")["sources"] == [
        {"dataset": "a/b", "weight": None},
        {"files": ["/c.jsonl"], "weight": None},
    ]
    assert set(found.missing) == {"data.sources.weight"}


def test_data_is_replaced_by_the_command_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c", encoding="utf-8")
    found = imported(Axolotl(), LORA, data=[str(text)], model="org/other", procs=1)
    assert slot(found, "data") == {
        "use": "data.text", "files": [str(text)], "heldout_fraction": 0.1, "sequence_length": 2048,
        "documents_apart": True,
    }  # fmt: skip
    assert outcome(found, "datasets[0].path").why == "--data replaces it"
    assert slot(found, "model")["path"] == "org/other"


@pytest.mark.parametrize(
    ("blocks", "key", "why"),
    [
        ([{"path": "a/b", "type": "sharegpt"}], "datasets[0].type", "axolotl has removed it"),
        ([{"path": "a/b", "type": {"format": "x"}}], "datasets[0].type",
         "prompts of one's own are not laid out"),
        ([{"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "completion"}],
         "datasets[1].type", "running text and rows are not one training"),
        ([{"path": "/a.jsonl", "split": "train[:5%]"}], "datasets[0].split",
         "files are read as a whole"),
        ([{"path": "a/b", "data_files": "x.json"}], "datasets[0].data_files",
         "a data set of the hub is read by its configuration and split"),
        ([{"path": "a/b", "type": "completion", "field": "x"},
          {"path": "c/d", "type": "completion"}], "datasets[0].field",
         "the text has one key in all files"),
    ],
)  # fmt: skip
def test_data_that_leaves_no_recipe(blocks: list[dict[str, Any]], key: str, why: str) -> None:
    found = made(datasets=blocks)
    assert found.recipe is None
    assert left_out(found)[key] == why


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"path": "a/b", "type": "chat_template", "roles_to_train": ["user"]}, "roles_to_train"),
        ({"path": "a/b", "type": "chat_template", "train_on_eos": "all"}, "train_on_eos"),
        ({"path": "a/b", "type": "chat_template", "field_messages": "talk"}, "field_messages"),
        ({"path": "a/b", "type": "chat_template", "chat_template": "chatml"}, "chat_template"),
        ({"path": "a/b", "type": "chat_template", "roles": {"user": ["me"]}}, "roles"),
        ({"path": "/x/rows.csv"}, "path"),
        ({"path": "s3://bucket/rows.jsonl"}, "path"),
        ({"path": "a/b", "shards": 10}, "shards"),
    ],
)
def test_what_rows_are_not_read_as(block: dict[str, Any], key: str) -> None:
    found = made(datasets=[block])
    assert found.recipe is not None
    assert f"datasets[0].{key}" in left_out(found)


@pytest.mark.parametrize(
    "said",
    [
        {"rl": "dpo"}, {"rl": "grpo", "trl": {"num_generations": 4}}, {"reward_model": True},
        {"process_reward_model": True}, {"relora": True}, {"adapter": "llama-adapter"},
        {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, {"use_eaft": True}, {"gptq": True},
        {"processor_type": "AutoProcessor"}, {"qat": {"weight_dtype": "int8"}},
        {"unfrozen_parameters": ["lm_head"]}, {"lora_rank_pattern": {"q_proj": 4}},
        {"model_type": "AutoModelForSequenceClassification"}, {"adapter": "lora", "lora_r": 8},
        {"adapter": "qlora", "lora_r": 8, "lora_alpha": 8}, {"expert_parallel_size": 2},
        {"deepspeed": "ds.json"},
        {"adapter": "lora", "lora_r": 8, "lora_alpha": 8,
         "lora_target_modules": r"model.layers.[\d]+.self_attn.(q|k)_proj"},
    ],
)  # fmt: skip
def test_what_no_recipe_does_without(said: dict[str, Any]) -> None:
    found = made(**said)
    assert found.recipe is None
    blocking = [each for each in found.outcomes if each.blocks]
    assert blocking
    assert all(each.why for each in blocking)


@pytest.mark.parametrize(
    "said",
    [
        {"optimizer": "muon"}, {"optimizer": "lion_32bit"}, {"lr_scheduler": "rex"},
        {"neftune_noise_alpha": 5}, {"load_in_8bit": True}, {"batch_size": 16},
        {"tokens": ["<x>"]}, {"val_set_size": 500}, {"save_strategy": "best"},
        {"sequence_len": "long"}, {"xformers_attention": True}, {"attn_implementation": "sage"},
        {"chat_template_jinja": "{{ x }}", "datasets": [{"path": "a/b", "type": "chat_template"}]},
        {"group_by_length": True}, {"min_sample_len": 4},
        {"dataset_exact_deduplication": True},
        {"lr_groups": [{"name": "x", "modules": ["y"], "lr": 1e-3}]}, {"hub_model_id": "me/x"},
        {"resume_from_checkpoint": "x"}, {"overrides_of_model_config": {"rope_theta": 1}},
    ],
)  # fmt: skip
def test_what_changes_the_numbers_is_refused(said: dict[str, Any]) -> None:
    found = made(**said)
    assert found.recipe is not None
    assert "refused" in outcomes(found).values()


def test_plugins_that_change_nothing() -> None:
    names = ["axolotl.integrations.swanlab.SwanLabPlugin", "axolotl.integrations.liger.LigerPlugin"]
    assert outcomes(made(plugins=names))["plugins"] == "default"
    assert made(plugins=[*names, "my.plugin"]).recipe is None


@pytest.mark.parametrize(
    ("said", "name", "fields"),
    [
        ({"optimizer": "paged_adamw_8bit"}, "optimizer", {"moments": "8bit"}),
        ({"optimizer": "ao_adamw_8bit"}, "optimizer", {"moments": "8bit"}),
        ({"warmup_steps": 10}, "optimizer", {"warmup_steps": 10}),
        ({"cosine_min_lr_ratio": 0.1}, "optimizer", {"final_lr_ratio": 0.1}),
        ({"max_grad_norm": 0.5}, "optimizer", {"max_grad_norm": 0.5}),
        (
            {"loraplus_lr_ratio": 16}, "optimizer",
            {"groups": [{"match": ["*.lora_B.*"], "lr_ratio": 16.0}]},
        ),
        ({"train_on_inputs": True}, "data", {"loss": "all"}),
        ({"excess_length_strategy": "raise"}, "data", {"too_long": "error"}),
        ({"flash_attention": True}, "model", {"attention": "flash_attention_2"}),
        ({"attn_implementation": "kernels-community/flash-attn3"}, "model",
         {"attention": "kernels-community/flash-attn3"}),
        ({"gradient_checkpointing": "offload"}, "model",
         {"activation_checkpointing": {"offload": True}}),
        ({"gradient_checkpointing": True, "selective_checkpointing": True}, "model",
         {"activation_checkpointing": {"keep": "attention"}}),
        ({"torch_compile": "auto"}, "model", {"compile": {}}),
        ({"fp8": True, "fp8_config": {"recipe": "rowwise"}}, "model",
         {"fp8": {"recipe": "rowwise"}}),
        ({"reinit_weights": True}, "model", {"init": "random"}),
        ({"save_steps": 50, "save_total_limit": 2}, "checkpoint", {"every": 50, "keep": 2}),
        ({"val_set_size": 0.1, "eval_steps": 20}, "train", {"eval_every": 20, "eval_first": True}),
        (
            {"val_set_size": 0.1, "evals_per_epoch": 2, "early_stopping_patience": 3}, "train",
            {"early_stopping": {"patience": 3}, "eval_every": "0.5 epochs", "eval_first": True},
        ),
        ({"curriculum_sampling": True}, "train", {"shuffle": False}),
        ({"max_steps": 7}, "train", {"steps": 7, "epochs": None}),
    ],
)  # fmt: skip
def test_keys(said: dict[str, Any], name: str, fields: dict[str, Any]) -> None:
    assert_fields(made(**said), name, fields)


def test_products_in_tf32_are_those_of_fp32() -> None:
    for narrow in ({}, {"fp16": True}):
        left_out = outcome(made(tf32=True, **narrow), "tf32")
        assert (left_out.outcome, left_out.why) == ("default", "no product is in fp32")
    assert_fields(made(tf32=True, bf16=False), "precision", {"compute": "fp32", "tf32": True})


def test_linear_layers_come_before_named_ones() -> None:
    said = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    found = made(**said, lora_target_modules=["q_proj"])
    assert slot(found, "adapter")["targets"] == "all-linear"
    assert outcome(found, "lora_target_modules").why.startswith("is not read")


def test_the_lowest_rate_is_that_of_a_cosine_alone() -> None:
    found = made(cosine_min_lr_ratio=0.1, lr_scheduler="linear")
    assert slot(found, "optimizer").get("final_lr_ratio") is None
    assert outcome(found, "cosine_min_lr_ratio").why == "is not read: lr_scheduler is linear"


def test_a_block_that_is_none_is_refused() -> None:
    assert outcome(made(fsdp_config=True), "fsdp_config").outcome == "refused"


def test_whoever_is_the_assistant_is_trained_on() -> None:
    rows = {"path": "a/b", "type": "chat_template", "roles_to_train": ["gpt", "assistant"]}
    assert_fields(made(datasets=[rows]), "data", {"loss": "assistant"})


def test_held_out_rows_of_another_form() -> None:
    held = [{"path": "/x/held.jsonl", "type": "chat_template"}]
    found = made(datasets=[{"path": "/x/rows.jsonl", "type": "alpaca"}], test_datasets=held)
    assert_fields(found, "data", {"form": None, "template": False})
    alpaca = [{"path": "/x/held.jsonl", "type": "alpaca"}]
    rows = [{**held[0], "path": "/x/chat.jsonl"}]
    pairs = made(datasets=rows, test_datasets=alpaca, eval_steps=5)
    assert_fields(pairs, "data", {"form": None, "template": False})
    assert "data.heldout_fraction" not in pairs.missing
    text = made(datasets=held, test_datasets=[{"path": "/x/a.txt", "type": "completion"}])
    assert text.recipe is None


def test_lora_settings_without_an_adapter_have_no_effect() -> None:
    found = made(lora_r=8, lora_alpha=16)
    assert "adapter" not in found.recipe["stages"]  # type: ignore[index]
    assert outcome(found, "lora_r").outcome == "default"


@pytest.mark.parametrize(
    ("said", "wrap", "batch"),
    [
        ({"context_parallel_size": 2}, {"use": "wrap.ddp", "context_parallel": {"size": 2}}, 4),
        (
            {"context_parallel_size": 2, "fsdp_config": {"fsdp_version": 2}},
            {"use": "wrap.fsdp", "context_parallel": {"size": 2}}, 4,
        ),
        (
            {"tensor_parallel_size": 2, "fsdp_version": 2, "fsdp_config": {"fsdp_version": 2}},
            {"use": "wrap.fsdp", "tensor_parallel": {"size": 2}}, 4,
        ),
        (
            {"tensor_parallel_size": 2, "deepspeed": {"zero_optimization": {"stage": 1}}},
            {"use": "wrap.zero", "stage": 1, "tensor_parallel": {"size": 2}}, 4,
        ),
        (
            {"dp_shard_size": 4, "dp_replicate_size": 2, "fsdp_config": {"fsdp_version": 2}},
            {"use": "wrap.fsdp", "sharding": "hybrid_shard", "shard_size": 4}, 8,
        ),
        (
            {"fsdp_config": {"fsdp_version": 2, "offload_params": True,
                             "cpu_offload_pin_memory": False, "reshard_after_forward": False}},
            {"use": "wrap.fsdp", "cpu_offload": True, "pin_memory": False,
             "sharding": "shard_grad_op"}, 8,
        ),
    ],
)  # fmt: skip
def test_strategies(said: dict[str, Any], wrap: dict[str, Any], batch: int) -> None:
    found = imported(Axolotl(), {**BASE, **said}, procs=8)
    assert left_out(found) == {}
    assert slot(found, "wrap") == wrap
    assert slot(found, "train")["global_batch_size"] == batch


def test_a_deepspeed_file_is_given_too() -> None:
    engine = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"},
              "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}  # fmt: skip
    content = {**BASE, "deepspeed": "deepspeed_configs/zero3.json", "micro_batch_size": 4}
    file = ConfigFile(path=Path("zero3.json"), content=engine)
    found = imported(Axolotl(), content, file, procs=2)
    assert slot(found, "wrap") == {"use": "wrap.zero", "stage": 3}
    assert slot(found, "train")["micro_batch_size"] == 4
    assert slot(found, "precision")["compute"] == "bf16"
    assert outcome(found, "train_micro_batch_size_per_gpu").why == (
        "auto: as micro_batch_size in recipe.yaml"
    )
    alone = imported(Axolotl(), content)
    assert alone.recipe is None
    assert outcome(alone, "deepspeed").hint == (
        "give it too: pipe import recipe.yaml deepspeed_configs/zero3.json"
    )


def test_pretraining_is_running_text() -> None:
    said = {"pretraining_dataset": [{"path": "a/c4", "name": "en", "type": "pretrain"}],
            "max_steps": 100, "sample_packing": True, "datasets": None}  # fmt: skip
    found = made(**said)
    assert slot(found, "data") == {
        "use": "data.text", "text_key": "text", "documents_apart": True, "sequence_length": 512,
        "sources": [{"dataset": "a/c4", "config": "en"}],
    }  # fmt: skip
    crossing = made(**said, pretrain_multipack_attn=False)
    assert slot(crossing, "data")["documents_apart"] is False
    assert slot(made(**{**said, "pretraining_dataset": "a/c4"}), "data")["use"] == "data.text"


def test_two_recipes_are_not_one_training() -> None:
    other = ConfigFile(path=Path("other.yaml"), content=BASE)
    with pytest.raises(UsageError, match="are both recipes of axolotl"):
        imported(Axolotl(), BASE, other)


def test_keys_that_contradict_each_other() -> None:
    found = made(bf16=True, float32=True)
    assert found.recipe is None
    assert left_out(found)["float32"] == "contradicts bf16: True in recipe.yaml"


def test_checkpoints_and_evaluations_of_epochs() -> None:
    def every(**said: Any) -> tuple[Any, Any]:
        found = made(**{"num_epochs": 3, "val_set_size": 0.1, **said})
        assert left_out(found) == {}
        return slot(found, "checkpoint").get("every"), slot(found, "train").get("eval_every")

    assert every() == ("1 epoch", None)  # axolotl saves after each epoch
    assert every(num_epochs=1) == (None, None)  # the run ends with a checkpoint
    assert every(saves_per_epoch=4, evals_per_epoch=3) == ("0.25 epochs", "1/3 epochs")
    assert every(save_steps=5, eval_steps=7) == (5, 7)
    assert every(save_strategy="epoch", eval_strategy="epoch") == ("1 epoch", "1 epoch")
    assert every(save_steps=0.05, eval_steps=0.1) == ("0.15 epochs", "0.3 epochs")  # of 3 epochs
    assert every(save_steps=0.25, max_steps=50, num_epochs=None) == (13, None)
    assert every(saves_per_epoch=0, evals_per_epoch=None) == ("1 epoch", None)


@pytest.mark.parametrize("size", [0, 0.0, None, "0"])
def test_without_held_out_rows_nothing_is_evaluated(size: Any) -> None:
    found = made(val_set_size=size, evals_per_epoch=4)
    assert left_out(found) == {}
    assert "heldout_fraction" not in slot(found, "data")
    assert "eval_every" not in slot(found, "train")
    assert outcome(found, "evals_per_epoch").why.startswith("is not read: nothing is held out")
    told = made(val_set_size=size, early_stopping_patience=2)
    assert list(left_out(told)) == ["early_stopping_patience"]


@pytest.mark.parametrize("name", ["muon", "lion_8bit", "ao_adamw_4bit"])
def test_the_rate_of_another_optimizer_is_not_kept(name: str) -> None:
    found = made(optimizer=name)
    assert set(left_out(found)) == {"optimizer", "learning_rate"}
    assert left_out(found)["learning_rate"] == f"is a rate for {name}, and this is AdamW"
    assert "lr" not in slot(found, "optimizer")
    assert "optimizer.lr" in found.missing


@pytest.mark.parametrize(
    ("said", "procs", "right"),
    [
        ({"tensor_parallel_size": 2, "fsdp_config": {"fsdp_version": 2}}, 4, True),
        ({"tensor_parallel_size": 3, "fsdp_config": {"fsdp_version": 2}}, 4, False),
        ({"context_parallel_size": 4}, 6, False),
        ({"sequence_parallel_degree": 8}, 4, False),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "fsdp_config": {"fsdp_version": 2}}, 4, True),
        ({"dp_replicate_size": 3, "dp_shard_size": 2, "fsdp_config": {"fsdp_version": 2}}, 4,
         False),
    ],
)  # fmt: skip
def test_sizes_of_axes_divide_the_processes(said: dict[str, Any], procs: int, right: bool) -> None:
    found = imported(Axolotl(), {**BASE, **said}, procs=procs)
    assert (found.recipe is not None) == right, left_out(found)
    assert right or all("does not divide" in why for why in left_out(found).values())


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["full_shard", "auto_wrap"], {}),
        ("full_shard auto_wrap offload", {"cpu_offload": True}),
        (["shard_grad_op", "auto_wrap"], {"sharding": "shard_grad_op"}),
    ],
)
def test_words_of_fsdp(words: Any, fields: dict[str, Any]) -> None:
    found = made(fsdp=words)
    assert left_out(found) == {}
    assert slot(found, "wrap") == {"use": "wrap.fsdp", **fields}
    assert made(fsdp=["full_shard", "xla"]).recipe is None
