"""torchtune's recipes: published ones, and the blocks that they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.importing.translator import Translation
from stages.importing.torchtune.translator import Torchtune
from tests.stages.importing.configs.torchtune import FULL, LORA
from tests.stages.importing.support import (
    assert_fields,
    by_outcome,
    imported,
    left_out,
    outcome,
    slot,
)

ROWS = {
    "_component_": "torchtune.datasets.chat_dataset", "source": "a/b",
    "conversation_column": "conversations", "conversation_style": "sharegpt",
}  # fmt: skip
TEXT = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "a/b"}
BASE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer",
                     "checkpoint_dir": "/models/llama"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 64},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
    "dataset": TEXT, "epochs": 1, "batch_size": 2, "dtype": "bf16",
}  # fmt: skip
GEMMA = {"_component_": "torchtune.models.gemma.gemma_tokenizer", "max_seq_len": 64}
DATASETS = "torchtune.datasets."


def made(procs: int | None = 2, **said: Any) -> Translation:
    return imported(Torchtune(), {**BASE, **said}, procs=procs)


def test_a_published_lora_recipe() -> None:
    found = imported(Torchtune(), LORA, procs=2)
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert found.recipe == {
        "name": "lora",
        "launch": {"procs": 2},
        "stages": {
            "model": {"use": "model.hf", "path": "/tmp/Meta-Llama-3.1-8B-Instruct"},
            "adapter": {
                "use": "adapter.lora", "rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": targets,
            },
            "precision": {
                "use": "precision.policy", "compute": "bf16", "master": "bf16", "reduce": "bf16",
            },
            "data": {
                "use": "data.chat", "form": "alpaca", "loss": "all", "packing": False,
                "sources": [{"dataset": "yahma/alpaca-cleaned"}],
                "too_long": "error",
            },
            "optimizer": {
                "use": "optimizer.adamw", "lr": 3e-4, "weight_decay": 0.01, "decay_all": True,
                "schedule": "cosine", "warmup_steps": 100, "max_grad_norm": None,
            },
            "wrap": {"use": "wrap.fsdp"},
            "checkpoint": {"use": "checkpoint.sharded", "keep": None},
            "train": {
                "use": "train.causal_lm", "epochs": 1.0, "global_batch_size": 32,
                "micro_batch_size": 2, "shuffle": True, "log_every": 1,
            },
            "consolidate": {"use": "consolidate.stream"},
            "export": {"use": "export.safetensors"},
        },
    }  # fmt: skip
    assert left_out(found) == {
        "dataset._component_": "torchtune puts Alpaca's prompt into a turn of the chat template"
    }
    assert set(found.missing) == {"data.sequence_length"}


def test_the_outcome_of_every_key_of_a_published_recipe() -> None:
    found = by_outcome(imported(Torchtune(), LORA, procs=2))
    assert found == {
        "default": {
            "tokenizer._component_", "tokenizer.path", "tokenizer.max_seq_len",
            "checkpointer._component_", "checkpointer.checkpoint_files",
            "checkpointer.recipe_checkpoint", "checkpointer.output_dir", "checkpointer.model_type",
            "resume_from_checkpoint", "save_adapter_weights_only", "seed", "optimizer.fused",
            "loss._component_", "max_steps_per_epoch", "clip_grad_norm", "compile",
            "metric_logger._component_", "metric_logger.log_dir", "log_peak_memory_stats", "device",
            "profiler", "enable_activation_checkpointing", "enable_activation_offloading",
        },
        "refused": {"dataset._component_"},
        "translated": {
            "output_dir", "model._component_", "model.lora_attn_modules", "model.apply_lora_to_mlp",
            "model.apply_lora_to_output", "model.lora_rank", "model.lora_alpha",
            "model.lora_dropout", "checkpointer.checkpoint_dir", "dataset.packed", "shuffle",
            "batch_size", "optimizer._component_", "optimizer.weight_decay", "optimizer.lr",
            "lr_scheduler._component_", "lr_scheduler.num_warmup_steps", "epochs",
            "gradient_accumulation_steps", "log_every_n_steps", "dtype",
        },
    }  # fmt: skip


def test_a_published_recipe_for_all_weights() -> None:
    found = imported(Torchtune(), FULL, procs=1)
    assert slot(found, "wrap") == {"use": "wrap.ddp"}
    assert "adapter" not in found.recipe["stages"]  # type: ignore[index]
    assert slot(found, "model") == {
        "use": "model.hf", "path": "/tmp/Llama-2-7b-hf",
        "activation_checkpointing": {"offload": True},
    }  # fmt: skip
    assert slot(found, "optimizer") == {
        "use": "optimizer.adamw", "lr": 1e-5, "decay_all": True, "schedule": "cosine",
        "warmup_steps": 100, "max_grad_norm": None,
    }  # fmt: skip
    assert slot(found, "train")["global_batch_size"] == 2
    assert set(left_out(found)) == {"dataset._component_"}


def test_a_recipe_for_one_device_is_known_by_its_name() -> None:
    single = imported(Torchtune(), BASE, name="8B_full_single_device.yaml")
    assert single.recipe is not None
    assert single.recipe["launch"] == {"procs": 1}
    assert slot(single, "wrap") == {"use": "wrap.ddp"}
    assert slot(single, "train")["global_batch_size"] == 2
    several = imported(Torchtune(), BASE, name="8B_full.yaml")
    assert slot(several, "wrap") == {"use": "wrap.fsdp"}
    assert "train.global_batch_size" in several.missing


def test_what_a_recipe_leaves_out_is_as_in_torchtune() -> None:
    found = made()
    assert left_out(found) == {}
    assert slot(found, "optimizer") == {
        "use": "optimizer.adamw", "lr": 2e-5, "schedule": "constant", "decay_all": True,
        "max_grad_norm": None,
    }  # fmt: skip
    assert slot(found, "data") == {
        "use": "data.chat", "form": "text", "loss": "all", "sequence_length": 64,
        "sources": [{"dataset": "a/b"}],
    }  # fmt: skip
    assert slot(found, "train") == {
        "use": "train.causal_lm", "epochs": 1.0, "global_batch_size": 4, "micro_batch_size": 2,
        "log_every": 1, "shuffle": True,
    }  # fmt: skip
    assert found.missing == {}
    assert "seed" not in found.recipe  # type: ignore[operator]
    lora = {"_component_": "torchtune.models.qwen2_5.qlora_qwen2_5_7b",
            "lora_attn_modules": ["k_proj"]}  # fmt: skip
    assert slot(made(model=lora), "adapter") == {
        "use": "adapter.lora", "quantize": "nf4", "rank": 8, "alpha": 16.0, "dropout": 0.0,
        "targets": ["k_proj"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dataset", "data"),
    [
        ({"_component_": "slimorca_dataset"},
         {"form": "sharegpt", "loss": "assistant",
          "sources": [{"dataset": "Open-Orca/SlimOrca-Dedup"}]}),
        ({**ROWS, "conversation_style": "openai", "conversation_column": "messages",
          "train_on_input": True, "packed": True, "split": "train[:5%]"},
         {"form": "messages", "loss": "all", "packing": True,
          "sources": [{"dataset": "a/b", "split": "train[:5%]"}]}),
        ({"_component_": "instruct_dataset", "source": "json", "data_files": "/x/rows.json",
          "column_map": {"input": "prompt", "output": "completion"}},
         {"form": "prompt/completion", "files": ["/x/rows.json"], "template": None}),
        ({"_component_": "text_completion_dataset", "source": "a/b", "column": "content",
          "packed": True, "name": "en"},
         {"use": "data.text", "text_key": "content", "documents_apart": True, "packing": None,
          "sources": [{"dataset": "a/b", "config": "en"}]}),
        ({"_component_": "text_completion_dataset", "source": "a/b", "packed": True,
          "split_across_pack": False},
         {"use": "data.chat", "form": "text", "packing": True, "loss": "all"}),
        ({"_component_": "text_completion_dataset", "source": "a/b"},
         {"use": "data.chat", "form": "text", "packing": None}),
    ],
)  # fmt: skip
def test_data_sets(dataset: dict[str, Any], data: dict[str, Any]) -> None:
    name = dataset["_component_"]
    full = {**dataset, "_component_": name if "." in name else f"{DATASETS}{name}"}
    found = made(dataset=full)
    templated = data.get("form") in ("sharegpt", "messages", "prompt/completion")
    # torchtune's tokenizer has a format of its own, a recipe takes the chat template
    assert set(left_out(found)) == ({"tokenizer._component_"} if templated else set())
    assert {key: slot(found, "data").get(key) for key in data} == data


@pytest.mark.parametrize(
    ("tokenizer", "template"), [(GEMMA, False), ({**GEMMA, "prompt_template": "x.Y"}, None)]
)
def test_the_prompt_of_alpaca(tokenizer: dict[str, Any], template: bool | None) -> None:
    found = made(tokenizer=tokenizer, dataset={"_component_": f"{DATASETS}alpaca_dataset"})
    assert slot(found, "data").get("template") is template
    assert ("dataset._component_" in left_out(found)) == (template is None)
    assert slot(found, "data")["loss"] == "all"


def test_pairs_without_a_template_for_a_tokenizer_that_has_none() -> None:
    pairs = {"_component_": f"{DATASETS}instruct_dataset", "source": "a/b",
             "column_map": {"input": "prompt", "output": "completion"}}  # fmt: skip
    found = made(tokenizer=GEMMA, dataset=pairs)
    assert left_out(found) == {}
    assert slot(found, "data")["template"] is False
    assert set(left_out(made(tokenizer=GEMMA, dataset=ROWS))) == {"tokenizer._component_"}


def test_several_data_sets() -> None:
    two = [TEXT, {**TEXT, "source": "c/d"}]
    found = made(dataset=two)
    assert [one["dataset"] for one in slot(found, "data")["sources"]] == ["a/b", "c/d"]
    assert "data.sources.weight" in found.missing
    held = made(dataset_val={**TEXT, "split": "test"}, run_val_every_n_steps=10)
    assert slot(held, "data")["heldout_sources"] == [{"dataset": "a/b", "split": "test"}]
    assert slot(held, "train")["eval_every"] == 10


@pytest.mark.parametrize(
    ("dataset", "key"),
    [
        ({"_component_": f"{DATASETS}preference_dataset", "source": "a/b"}, "_component_"),
        ({"_component_": "my.own_dataset", "source": "a/b"}, "_component_"),
        ({**ROWS, "conversation_column": "talk"}, "conversation_column"),
        ({**ROWS, "filter_fn": "x"}, "filter_fn"),
        ({**ROWS, "conversation_style": "other"}, "conversation_style"),
        ({"_component_": f"{DATASETS}instruct_dataset", "source": "a/b",
          "column_map": {"input": "q", "output": "a"}}, "column_map"),
        ({"_component_": f"{DATASETS}text_completion_dataset", "source": "a/b", "column": "x"},
         "column"),
    ],
)  # fmt: skip
def test_data_that_leaves_no_recipe(dataset: dict[str, Any], key: str) -> None:
    found = made(dataset=dataset)
    assert found.recipe is None
    assert f"dataset.{key}" in left_out(found)


@pytest.mark.parametrize(
    "said",
    [
        {"model": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_11b"}},
        {"model": {"_component_": "my.model"}},
        {"model": {**BASE["model"], "rope_base": 5}},
        {"model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
                   "lora_attn_modules": ["k_norm"]}},
        {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}},
        {"optimizer": {**BASE["optimizer"], "nesterov": True}},
        {"quantizer": {"_component_": "torchtune.training.quantization.Int8Quantizer"}},
        {"teacher_model": {"_component_": "torchtune.models.qwen2.qwen2_1_5b"}},
        {"dtype": "fp8"}, {"collate_fn": "my.collate"},
    ],
)  # fmt: skip
def test_what_no_recipe_does_without(said: dict[str, Any]) -> None:
    found = made(**said)
    assert found.recipe is None
    assert all(each.why for each in found.outcomes if each.blocks)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"lr_scheduler": {"_component_": "torch.optim.lr_scheduler.StepLR"}},
         "lr_scheduler._component_"),
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint"),
        ({"tokenizer": {**BASE["tokenizer"], "prompt_template": "my.Template"}},
         "tokenizer.prompt_template"),
        ({"checkpointer": {**BASE["checkpointer"], "recipe_checkpoint": "recipe_state.pt"}},
         "checkpointer.recipe_checkpoint"),
        ({"checkpointer": {"_component_": "torchtune.training.FullModelMetaCheckpointer",
                           "checkpoint_dir": "/x"}}, "checkpointer._component_"),
        ({"checkpointer": {"checkpoint_dir": "${oc.env:HOME}/x"}}, "checkpointer.checkpoint_dir"),
        ({"tokenizer": GEMMA,
          "dataset": {"_component_": f"{DATASETS}instruct_dataset", "source": "a/b"}},
         "dataset._component_"),
        ({"model": {"_component_": "torchtune.models.phi3.lora_phi3_mini",
                    "lora_attn_modules": ["q_proj"]}}, "model.lora_attn_modules"),
    ],
)  # fmt: skip
def test_what_changes_the_numbers_is_refused(said: dict[str, Any], key: str) -> None:
    found = made(**said)
    assert found.recipe is not None
    assert list(left_out(found)) == [key]


@pytest.mark.parametrize(
    ("said", "name", "fields"),
    [
        ({"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 1e-3, "eps": 1e-6,
                        "betas": [0.9, 0.95]}}, "optimizer",
         {"moments": "8bit", "eps": 1e-6, "betas": [0.9, 0.95]}),
        ({"clip_grad_norm": 1.0}, "optimizer", {"max_grad_norm": 1.0}),
        ({"dtype": "fp32"}, "precision", {"compute": "fp32", "master": None}),
        ({"compile": True}, "model", {"compile": {}}),
        ({"compile": {"model": False, "loss": True}}, "model", {"compile": None}),
        ({"enable_activation_checkpointing": True, "ac_mode": "selective", "ac_option": 2}, "model",
         {"activation_checkpointing": {"every": 2}}),
        ({"fsdp": {"cpu_offload": True}}, "wrap", {"cpu_offload": True}),
        ({"fsdp_cpu_offload": True, "fsdp_reshard_after_forward": False}, "wrap",
         {"cpu_offload": True, "sharding": "shard_grad_op"}),
        ({"max_steps_per_epoch": 5, "epochs": 3}, "train", {"steps": 15, "epochs": None}),
        ({"shuffle": False}, "train", {"shuffle": False}),
        ({"tensor_parallel_dim": 2, "data_parallel_shard_dim": -1,
          "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}},
         "wrap", {"tensor_parallel": {"size": 2}}),
    ],
)  # fmt: skip
def test_keys(said: dict[str, Any], name: str, fields: dict[str, Any]) -> None:
    assert_fields(made(**said), name, fields)


def test_ranks_that_share_a_sample() -> None:
    found = made(procs=8, tensor_parallel_dim=2, context_parallel_dim=2)
    assert slot(found, "train")["global_batch_size"] == 4


def test_steps_of_epochs_that_end_early_say_so() -> None:
    found = outcome(made(max_steps_per_epoch=5, epochs=3), "max_steps_per_epoch")
    assert (found.to, found.why) == (
        {"train.steps": 15}, "epochs x steps, if an epoch has so many",
    )  # fmt: skip


def test_an_adapter_can_be_exported_alone() -> None:
    lora = {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
            "lora_attn_modules": ["q_proj"]}  # fmt: skip
    found = made(model=lora, save_adapter_weights_only=True)
    assert slot(found, "export") == {"use": "export.adapter"}
    assert outcome(found, "save_adapter_weights_only").outcome == "translated"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"output_dir": "/runs/one"}, "one"),
        ({"output_dir": "${root}/two", "root": "/runs"}, "two"),
        ({"output_dir": "${names.run}", "names": {"run": "three"}}, "three"),
    ],
)
def test_references_within_the_file(values: Mapping[str, Any], name: str) -> None:
    assert made(**values).recipe["name"] == name  # type: ignore[index]


def test_references_that_end_nowhere_are_refused() -> None:
    found = made(output_dir="${a}", a="${b}", b="${a}")
    assert found.recipe is not None
    assert found.recipe["name"] == "recipe"
    assert left_out(found)["output_dir"] == "refers to something outside the file"


def test_the_rate_of_another_optimizer_is_not_kept() -> None:
    found = made(optimizer={"_component_": "torch.optim.SGD", "lr": 1})
    assert list(left_out(found)) == ["optimizer._component_", "optimizer.lr"]
    assert "lr" not in slot(found, "optimizer")
