"""Whatever `pipe import` writes with exit code 0, `pipe check` accepts.

Values that need a GPU are left out: `pipe check` says so of them on another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pipeline.cli import main
from tests.support.tier import times

SIZES = (None, 1, 2, 3)
"""Of axes; the model has 6 attention heads."""
SWITCH = (None, True, False)
OPTIMIZER_KEYS: Mapping[str, tuple[Any, ...]] = {
    "weight_decay": (0.0, 0.1, "0.01"),
    "max_grad_norm": (0, 1.0, 0.5),
    "warmup_ratio": (0, 0.03),
    "warmup_steps": (0, 10, 0.1),
    "adam_beta2": (0.95, 0.999),
    "adam_epsilon": (1e-8, 1e-6),
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "optim": ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "muon"),
}
TRAINER_KEYS: Mapping[str, tuple[Any, ...]] = {
    **OPTIMIZER_KEYS,
    "num_train_epochs": (1, 3, 0.5),
    "max_steps": (-1, 0, 100),
    "per_device_train_batch_size": (1, 4),
    "gradient_accumulation_steps": (1, 3),
    "eval_strategy": ("no", "steps", "epoch"),
    "eval_steps": (None, 50, 0.1),
    "save_strategy": ("no", "steps", "epoch"),
    "save_steps": (10, 0.25),
    "save_total_limit": (None, 1, 3),
    "load_best_model_at_end": SWITCH,
    "bf16": SWITCH,
    "fp16": SWITCH,
    "tf32": SWITCH,
    "use_cpu": SWITCH,
    "gradient_checkpointing": SWITCH,
    "torch_compile": SWITCH,
    "logging_steps": (1, 10),
    "dataloader_num_workers": (0, 2),
    "do_train": SWITCH,
    "do_eval": SWITCH,
    "do_predict": SWITCH,
    "seed": (0, 42),
    "fsdp": (
        None, "", [], "full_shard", "full_shard auto_wrap", ["full_shard", "auto_wrap"],
        ["shard_grad_op", "auto_wrap"], ["hybrid_shard", "offload"], True,
    ),
    "fsdp_config": (
        {}, {"fsdp_version": 2, "reshard_after_forward": False},
        {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "offload_params": True},
        {"activation_checkpointing": True},
    ),
    "deepspeed": (None, {"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 3}}),
    "report_to": ("none", ["tensorboard"], "trackio"),
}  # fmt: skip
SCRIPT_KEYS: Mapping[str, tuple[Any, ...]] = {
    **TRAINER_KEYS,
    "max_length": (None, 16, 64),
    "validation_split_percentage": (0, 5, 80),
    "packing": SWITCH,
    "assistant_only_loss": SWITCH,
    "completion_only_loss": SWITCH,
    "use_peft": SWITCH,
    "lora_r": (4, 8),
    "lora_target_modules": ("all-linear", ["q_proj", "v_proj"]),
    "lora_modules_to_save": (None, ["lm_head"]),
    "use_dora": SWITCH,
    "load_in_4bit": SWITCH,
    "parallelism_config": (
        {"tp_size": 2}, {"cp_size": 3}, {"sp_size": 2},
        {"dp_replicate_size": 2, "dp_shard_size": 2}, {"dp_shard_size": 4, "tp_size": 2},
    ),
}  # fmt: skip
AXOLOTL_KEYS: Mapping[str, tuple[Any, ...]] = {
    **{key: TRAINER_KEYS[key] for key in (
        "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit", "fsdp",
        "bf16", "fp16", "tf32", "gradient_checkpointing", "torch_compile", "deepspeed", "max_steps",
        "load_best_model_at_end", "warmup_steps", "warmup_ratio", "weight_decay", "max_grad_norm",
        "seed", "fsdp_config",
    )},
    "val_set_size": (None, 0, 0.0, "0", 0.05, 0.9),
    "evals_per_epoch": (None, 0, 1, 3, 4),
    "saves_per_epoch": (None, 0, 1, 3, 4),
    "early_stopping_patience": (None, 2),
    "num_epochs": (1, 4, 0.5),
    "micro_batch_size": (1, 2),
    "gradient_accumulation_steps": (1, 4),
    "sequence_len": (16, 64),
    "sample_packing": SWITCH,
    "excess_length_strategy": ("drop", "truncate", "raise"),
    "train_on_inputs": SWITCH,
    "adapter": (None, "", "lora", "qlora"),
    "lora_r": (4, 8),
    "lora_alpha": (8, 16),
    "lora_target_linear": SWITCH,
    "lora_target_modules": (None, ["q_proj", "v_proj"]),
    "loraplus_lr_ratio": (None, 16),
    "load_in_4bit": SWITCH,
    "load_in_8bit": SWITCH,
    "optimizer": ("adamw_torch", "adamw_8bit", "lion_8bit"),
    "lr_scheduler": ("cosine", "linear", "rex"),
    "cosine_min_lr_ratio": (None, 0.1),
    "tensor_parallel_size": SIZES,
    "context_parallel_size": SIZES,
    "dp_shard_size": SIZES,
    "dp_replicate_size": SIZES,
    "activation_offloading": (None, False, True, "legacy"),
    "selective_checkpointing": (None, True),
    "wandb_project": (None, "", "x"),
    "curriculum_sampling": SWITCH,
}  # fmt: skip
FACTORY_KEYS: Mapping[str, tuple[Any, ...]] = {
    **TRAINER_KEYS,
    "stage": ("sft", "pt", "dpo"),
    "finetuning_type": ("lora", "full", "freeze"),
    "lora_rank": (4, 8),
    "lora_target": ("all", "q_proj,v_proj"),
    "additional_target": (None, "lm_head"),
    "cutoff_len": (16, 64),
    "packing": SWITCH,
    "neat_packing": SWITCH,
    "val_size": (None, 0, 0.0, 0.1, 100),
    "train_on_prompt": SWITCH,
    "mask_history": SWITCH,
    "pure_bf16": SWITCH,
    "quantization_bit": (None, 4, 8),
    "double_quantization": (None, False),
    "disable_gradient_checkpointing": SWITCH,
    "use_unsloth_gc": SWITCH,
    "early_stopping_steps": (None, 3),
    "disable_shuffling": SWITCH,
    "use_galore": SWITCH,
    "flash_attn": ("auto", "sdpa", "disabled"),
    "predict_with_generate": SWITCH,
    "template": ("llama3", None),
}
TUNE_KEYS: Mapping[str, tuple[Any, ...]] = {
    "epochs": (1, 3),
    "max_steps_per_epoch": (None, -1, 5),
    "batch_size": (1, 2),
    "gradient_accumulation_steps": (1, 4),
    "clip_grad_norm": (None, 1.0),
    "compile": SWITCH,
    "optimizer_in_bwd": SWITCH,
    "log_every_n_steps": (1, 5),
    "run_val_every_n_steps": (None, 10),
    "device": ("cuda", "cpu"),
    "dtype": ("bf16", "fp32"),
    "enable_activation_checkpointing": SWITCH,
    "enable_activation_offloading": SWITCH,
    "ac_option": (None, 2),
    "fsdp_cpu_offload": SWITCH,
    "fsdp_reshard_after_forward": SWITCH,
    "tensor_parallel_dim": SIZES,
    "context_parallel_dim": SIZES,
    "data_parallel_replicate_dim": SIZES,
    "data_parallel_shard_dim": (-1, 2, 4),
    "save_adapter_weights_only": SWITCH,
    "seed": (None, 7),
    "shuffle": SWITCH,
    "lr_scheduler": (
        None,
        {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
         "num_warmup_steps": 10},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of rows, by their form."""
    folder = tmp_path_factory.mktemp("rows")
    content = {
        "alpaca": {"instruction": "a b", "input": "", "output": "c"},
        "text": {"text": "a b c"},
    }
    for form, row in content.items():
        (folder / f"{form}.jsonl").write_text(f"{json.dumps(row)}\n" * 8, encoding="utf-8")
    return {form: str(folder / f"{form}.jsonl") for form in content}


def bases(model: Path, rows: Mapping[str, str]) -> dict[str, tuple[dict[str, Any], Any]]:
    """Tool -> a recipe that is right, and the values to draw for further keys."""
    lora = {"lora_attn_modules": ["q_proj"], "lora_rank": 4, "lora_alpha": 8}
    tune = {
        "model": {"_component_": "torchtune.models.llama3.lora_llama3_8b", **lora},
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 16},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(model),
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset", "source": "json",
            "data_files": rows["text"], "packed": True,
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "epochs": 1,
        "batch_size": 2,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    }  # fmt: skip
    script = {"model_name_or_path": str(model), "output_dir": "x", "learning_rate": 1e-4}
    return {
        "script": ({**script, "train_file": rows["text"]}, SCRIPT_KEYS),
        "axolotl": (
            {"base_model": str(model), "learning_rate": 1e-4, "sequence_len": 16,
             "datasets": [{"path": rows["alpaca"], "type": "alpaca"}]},
            AXOLOTL_KEYS,
        ),
        "LLaMA-Factory": (
            {**script, "stage": "sft", "finetuning_type": "full", "do_train": True,
             "dataset": "mine", "dataset_dir": {"mine": {"file_name": rows["alpaca"]}}},
            FACTORY_KEYS,
        ),
        "torchtune": (tune, TUNE_KEYS),
    }  # fmt: skip


def drawn(values: Mapping[str, tuple[Any, ...]]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw up to seven keys with one of their values."""
    keys = st.lists(st.sampled_from(sorted(values)), max_size=7, unique=True)
    return keys.flatmap(
        lambda chosen: st.fixed_dictionaries({key: st.sampled_from(values[key]) for key in chosen})
    )


@pytest.mark.parametrize("tool", ["script", "axolotl", "LLaMA-Factory", "torchtune"])
@settings(
    max_examples=times(quick=40, full=1500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_what_is_imported_without_a_word_is_right(
    tool: str, model: Path, rows: dict[str, str], tmp_path: Path, data: st.DataObject
) -> None:
    base, values = bases(model, rows)[tool]
    content = {**base, **data.draw(drawn(values))}
    procs = data.draw(st.sampled_from([1, 2, 4, 6]))
    config, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    recipe.unlink(missing_ok=True)
    arguments = ["import", str(config), "-o", str(recipe), "--procs", str(procs)]
    said = CliRunner().invoke(main, arguments)
    event(f"exit code {said.exit_code}")
    assert said.exit_code in (0, 2, 3), said.output
    assert recipe.exists() == (said.exit_code != 2)
    if said.exit_code == 0:
        checked = CliRunner().invoke(main, ["check", str(recipe)])
        assert checked.exit_code == 0, f"{checked.output}\n{recipe.read_text('utf-8')}"
