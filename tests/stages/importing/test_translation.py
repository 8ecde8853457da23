"""Translation of keys, alone and together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.importing.translator import (
    ConfigFile,
    Request,
    Translation,
    as_json,
    choose,
    recipe_text,
    table,
)
from stages.importing.reader import TABLES
from stages.importing.trainer import DEFAULTS
from stages.importing.translator import HuggingFace
from tests.stages.importing.drawn import assert_every_key_has_an_outcome, contents
from tests.stages.importing.support import from_files, left_out, outcome, slot, translated
from tests.support.tier import times


def test_training_arguments_alone() -> None:
    made = translated(
        {
            "output_dir": "out/my run", "per_device_train_batch_size": 4, "max_steps": 20,
            "gradient_accumulation_steps": 2, "learning_rate": "2e-5", "adam_beta2": 0.95,
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-6},
            "warmup_steps": 0.1, "weight_decay": 0.1, "max_grad_norm": 0, "bf16": True,
            "save_strategy": "no", "eval_strategy": "steps", "logging_steps": 5,
            "dataloader_num_workers": 3, "train_sampling_strategy": "sequential", "seed": 3,
        },
        procs=4,
    )  # fmt: skip
    assert left_out(made) == {}
    assert made.recipe == {
        "name": "my-run",
        "seed": 3,
        "launch": {"procs": 4},
        "stages": {
            "model": {"use": "model.hf"},
            "precision": {"use": "precision.policy", "compute": "bf16"},
            "data": {"use": "data.text"},
            "optimizer": {
                "use": "optimizer.adamw", "lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": 0.1,
                "schedule": "cosine", "warmup_ratio": 0.1, "final_lr_ratio": pytest.approx(0.1),
                "max_grad_norm": None,
            },
            "wrap": {"use": "wrap.ddp"},
            "checkpoint": {"use": "checkpoint.sharded", "keep": None},
            "train": {
                "use": "train.causal_lm", "steps": 20, "global_batch_size": 32,
                "micro_batch_size": 4, "shuffle": False, "workers": 3, "log_every": 5,
                "eval_every": 5,
            },
            "consolidate": {"use": "consolidate.stream"},
            "export": {"use": "export.safetensors"},
        },
    }  # fmt: skip
    assert set(made.missing) == {"model.path", "data.files", "data.heldout_fraction"}
    batch = outcome(made, "gradient_accumulation_steps")
    assert (batch.outcome, dict(batch.to)) == ("translated", {"train.global_batch_size": 32})
    assert made.notes["stages", "optimizer", "lr"] == "learning_rate in 0.json"


def test_what_training_arguments_leave_out_is_as_in_transformers() -> None:
    made = translated({"output_dir": "x"}, procs=1)
    assert made.recipe is not None
    assert made.recipe["seed"] == 42
    assert slot(made, "precision")["compute"] == "fp32"
    optimizer = slot(made, "optimizer")
    assert (optimizer["lr"], optimizer["weight_decay"], optimizer["schedule"]) == (
        5e-5, 0.0, "linear",
    )  # fmt: skip
    assert slot(made, "train")["epochs"] == 3.0
    assert slot(made, "train")["global_batch_size"] == 8
    assert slot(made, "checkpoint") == {"use": "checkpoint.sharded", "every": 500, "keep": None}


def test_auto_is_what_the_arguments_say(configs: Path) -> None:
    arguments = {
        "output_dir": "x", "per_device_train_batch_size": 2, "learning_rate": 3e-4,
        "adam_beta1": 0.8, "bf16": True, "warmup_ratio": 0.2, "max_grad_norm": 0.7,
    }  # fmt: skip
    engine = json.loads((configs / "engines/stage3_auto.json").read_text())
    made = translated(arguments, engine, procs=2)
    optimizer = slot(made, "optimizer")
    assert optimizer["lr"] == 3e-4
    assert optimizer["betas"] == [0.8, 0.999]
    assert optimizer["warmup_ratio"] == 0.2
    assert optimizer["max_grad_norm"] == 0.7
    assert slot(made, "precision")["compute"] == "bf16"
    assert slot(made, "train")["global_batch_size"] == 4
    assert "reduce_bucket_size" not in slot(made, "wrap")
    size = outcome(made, "zero_optimization.reduce_bucket_size")
    assert (size.outcome, size.why) == ("default", "auto, and no file has the value")
    assert outcome(made, "optimizer.params.lr").why == "auto: as learning_rate in 0.json"
    assert outcome(made, "optimizer.params.eps").why == "auto: as transformers fills it in"
    # the scheduler block takes precedence, as in transformers; the arguments' default is linear
    assert optimizer["schedule"] == "constant"


def test_auto_without_arguments_is_their_default(configs: Path) -> None:
    made = from_files(configs, "engines/stage2_auto.json", procs=2)
    optimizer = slot(made, "optimizer")
    assert (optimizer["lr"], optimizer["eps"], optimizer["max_grad_norm"]) == (5e-5, 1e-8, 1.0)
    assert slot(made, "train")["global_batch_size"] == 16
    assert left_out(made) == {}
    size = "zero_optimization.reduce_bucket_size"
    assert outcome(made, size).to == {"wrap.reduce_bucket_size": 300_000_000}


def test_the_global_batch_size_needs_no_number_of_processes(configs: Path) -> None:
    made = from_files(configs, "engines/stage1_numbers.json")
    assert made.recipe is not None
    assert "launch" not in made.recipe
    assert slot(made, "train")["global_batch_size"] == 96
    assert slot(made, "optimizer")["decay_all"] is True


def test_batch_sizes_that_do_not_agree(configs: Path) -> None:
    made = from_files(configs, "engines/stage1_numbers.json", procs=3)
    assert made.recipe is None
    assert left_out(made) == {
        "train_batch_size": "is not 6 a process x 4 micro-batches x 3 processes"
    }


def test_the_length_of_a_schedule_is_that_of_the_training(configs: Path) -> None:
    made = from_files(configs, "engines/stage2_numbers.json")
    assert slot(made, "train")["steps"] == 30_000
    assert slot(made, "optimizer")["schedule"] == "linear"
    both = from_files(configs, "engines/stage2_numbers.json", "trainer/script.yaml")
    assert both.recipe is None  # cosine, and another learning rate
    assert left_out(both)["optimizer.params.lr"] == (
        "contradicts learning_rate: 0.0003 in script.yaml"
    )


@pytest.mark.parametrize(
    ("block", "wrap"),
    [
        ({"fsdp_version": 2}, {}),
        ({"fsdp_sharding_strategy": 2}, {"sharding": "shard_grad_op"}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"sharding": "hybrid_shard"}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, {"sharding": "shard_grad_op"}),
        ({"fsdp_offload_params": True, "offload_params": True}, {"cpu_offload": True}),
        ({"fsdp_forward_prefetch": "true"}, {"forward_prefetch": 1}),
        (
            {"fsdp_transformer_layer_cls_to_wrap": "A, B", "fsdp_min_num_params": 0},
            {"units": ["A", "B"]},
        ),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
    ],
)
def test_fsdp(block: dict[str, Any], wrap: dict[str, Any]) -> None:
    made = translated({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": block})
    assert left_out(made) == {}
    assert slot(made, "wrap") == {"use": "wrap.fsdp", **wrap}


def test_two_axes_of_data_parallelism() -> None:
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1}
    block = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    made = translated({"distributed_type": "FSDP", "parallelism_config": block})
    assert slot(made, "wrap") == {
        "use": "wrap.fsdp", "sharding": "hybrid_shard", "shard_size": 4,
    }  # fmt: skip


def sizes(**given: Any) -> dict[str, Any]:
    """Return accelerate's file for FSDP with these sizes of axes."""
    block = {f"parallelism_config_{key}": value for key, value in given.items()}
    return {"distributed_type": "FSDP", "parallelism_config": block}


def test_axes_of_accelerate() -> None:
    given = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2, "cp_size": 2}
    harmless = {"cp_backend": "torch", "cp_comm_strategy": "alltoall", "sp_size": 1}
    file = {**sizes(**given, **harmless), "num_processes": 32}
    made = translated(file, {"output_dir": "x", "per_device_train_batch_size": 3})
    assert left_out(made) == {}
    assert slot(made, "wrap") == {
        "use": "wrap.fsdp", "sharding": "hybrid_shard", "shard_size": 8,
        "tensor_parallel": {"size": 2}, "context_parallel": {"size": 2},
    }  # fmt: skip
    # eight groups of four ranks that share their samples
    assert slot(made, "train")["global_batch_size"] == 24
    strategy = outcome(made, "parallelism_config.parallelism_config_cp_comm_strategy")
    assert strategy.outcome == "default"


@pytest.mark.parametrize(
    ("content", "procs", "key", "why"),
    [
        (
            {**sizes(dp_shard_size=2, tp_size=2), "num_processes": 8}, None, "tp_size",
            "the sizes multiply to 4, and there are 8 processes",
        ),
        ({**sizes(dp_shard_size=2, tp_size=2), "num_processes": 8}, 16, "", ""),
        (
            sizes(dp_replicate_size=2, cp_size=2), None, "cp_size",
            "accelerate takes it only with dp_shard_size > 1",
        ),
        (sizes(dp_shard_size=4, cp_backend="ring"), None, "cp_backend", "is always torch"),
    ],
)  # fmt: skip
def test_axes_that_accelerate_itself_refuses(
    content: dict[str, Any], procs: int | None, key: str, why: str
) -> None:
    made = translated(content, procs=procs)
    found = left_out(made)
    assert bool(found) == bool(key)
    assert not key or found[f"parallelism_config.parallelism_config_{key}"].startswith(why)


def test_axes_of_deepspeed() -> None:
    content = {
        "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3, "train_batch_size": 48, "sequence_parallel_size": 2,
        "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}, "tp_overlap_comm": True},
    }  # fmt: skip
    made = translated({**content, "sequence_parallel_size": 1}, procs=8)
    assert left_out(made) == {}
    assert slot(made, "wrap") == {
        "use": "wrap.zero", "stage": 1, "tensor_parallel": {"size": 2},
    }  # fmt: skip
    # DeepSpeed counts 2 x 3 samples for each of 8 ranks, of which pairs have the same
    assert slot(made, "train")["global_batch_size"] == 24
    made = translated({**content, "train_batch_size": 24}, procs=8)
    assert slot(made, "wrap")["context_parallel"] == {"size": 2}
    assert slot(made, "train")["global_batch_size"] == 12
    made = translated({**content, "train_batch_size": 47}, procs=8)
    assert left_out(made) == {
        "train_batch_size": "counts each sample for 2 ranks, which do not divide it"
    }


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "without sharding, each rank has whole layers"),
        ({"pipeline": {"stages": 2}}, "wrap.zero puts every block on each rank"),
        ({"expert_parallel": {"enabled": True}}, "wrap.zero puts every expert on each rank"),
    ],
)
def test_axes_that_zero_does_not_have(said: dict[str, Any], why: str) -> None:
    made = translated({"zero_optimization": {"stage": 0}, "train_batch_size": 8, **said})
    assert made.recipe is None
    assert list(left_out(made).values()) == [why]


def test_a_plan_of_layers_of_deepspeed_is_not_needed() -> None:
    block = {"autotp_size": 2, "preset_model": "llama"}
    made = translated({"zero_optimization": {"stage": 3}, "tensor_parallel": block})
    assert slot(made, "wrap")["tensor_parallel"] == {"size": 2}
    assert left_out(made) == {
        "tensor_parallel.preset_model": "layers are divided by the architecture's plan"
    }


def test_the_same_axis_in_two_files() -> None:
    engine = {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 4}
    block = {"parallelism_config_sp_size": 2, "parallelism_config_sp_backend": "deepspeed"}
    made = translated({"distributed_type": "DEEPSPEED", "parallelism_config": block}, engine)
    assert made.recipe is None
    assert "contradicts" in left_out(made)["sequence_parallel_size"]
    made = translated({"output_dir": "x", "parallelism_config": {"sp_size": 4}}, engine, procs=8)
    assert slot(made, "wrap") == {
        "use": "wrap.zero", "stage": 2, "context_parallel": {"size": 4},
    }  # fmt: skip
    assert slot(made, "train")["global_batch_size"] == 16


@pytest.mark.parametrize(
    "content",
    [
        {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
        {"distributed_type": "FSDP", "mixed_precision": "fp8"},
        {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_tp_size": 2}},
        {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"},
        {"zero_optimization": {"stage": 4}, "train_batch_size": 8},
        {"zero_optimization": {"stage": 1}, "expert_parallel": {"autoep_size": 2}},
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "no.json"}},
        {"output_dir": "x", "bf16": True, "fp16": True},
    ],
)
def test_what_no_recipe_does_without(content: dict[str, Any]) -> None:
    made = translated(content)
    assert made.recipe is None
    assert [each for each in made.outcomes if each.blocks]


def test_a_block_that_is_not_read() -> None:
    made = translated(
        {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2, "nonsense": 1}}
    )
    assert slot(made, "wrap") == {"use": "wrap.ddp"}
    assert left_out(made) == {}
    assert outcome(made, "fsdp_config").why == "is not read: distributed_type is MULTI_GPU"


def test_stage_0_is_no_sharding() -> None:
    made = translated({"zero_optimization": {"stage": 0, "overlap_comm": True}, "bf16": {}})
    assert slot(made, "wrap") == {"use": "wrap.ddp"}
    assert outcome(made, "zero_optimization.overlap_comm").outcome == "default"


def test_further_keys_of_deepspeed_go_to_it() -> None:
    made = translated(
        {
            "zero_optimization": {
                "stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True,
                "leaf_module": {"classes": ["Block"]}, "reduce_scatter": True,
            },
            "flops_profiler": {"enabled": True, "profile_step": 3},
            "communication_data_type": "bf16", "bf16": {"enabled": True},
        }
    )  # fmt: skip
    assert slot(made, "wrap") == {
        "use": "wrap.zero",
        "stage": 3,
        "plus_plus": {"secondary_partition": 2, "quantized_weights": True},
        "extra": {"zero_optimization": {"leaf_module": {"classes": ["Block"]}}},
    }
    assert outcome(made, "flops_profiler").outcome == "default"
    assert slot(made, "precision") == {
        "use": "precision.policy", "compute": "bf16", "reduce": "bf16",
    }  # fmt: skip


def test_an_unknown_key_is_not_translated_and_reported_with_its_place() -> None:
    inner = {"stage": 2, "overlap_com": True, "new_feature": {"level": 3}, "old_feature": None}
    made = translated({"output_dir": "x", "learning_rat": 1e-3}, {"zero_optimization": inner})
    assert made.recipe is not None
    unknown = [each for each in made.outcomes if each.outcome == "not translated"]
    assert [(each.file, each.key, each.value, each.hint) for each in unknown] == [
        ("0.json", "learning_rat", 1e-3, "did you mean `learning_rate`?"),
        ("1.json", "zero_optimization.overlap_com", True, "did you mean `overlap_comm`?"),
        ("1.json", "zero_optimization.new_feature", {"level": 3}, ""),
    ]
    assert outcome(made, "zero_optimization.old_feature").outcome == "default"


@pytest.mark.parametrize(
    "said",
    [
        {"neftune_noise_alpha": 5}, {"label_smoothing_factor": 0.1}, {"optim_args": "a=1"},
        {"dataloader_drop_last": True}, {"group_loss": 1, "router_aux_loss_coef": 0.1},
        {"accelerator_config": {"split_batches": True}}, {"resume_from_checkpoint": "x"},
        {"lr_scheduler_kwargs": {"num_cycles": 3}}, {"torch_dtype": "bfloat16"},
        {"push_to_hub": True}, {"data_seed": 4}, {"optim": "lion_32bit"},
        {"lr_scheduler_type": "warmup_stable_decay"},
    ],
)  # fmt: skip
def test_what_changes_the_numbers_is_refused(said: dict[str, Any]) -> None:
    made = translated({"output_dir": "x", "seed": 1, **said})
    assert "refused" in {each.outcome for each in made.outcomes}


def test_the_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert {key: theirs[key] for key in DEFAULTS} == DEFAULTS
    assert theirs["save_total_limit"] is None  # so all checkpoints are kept


def test_a_model_and_data_of_the_scripts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n', encoding="utf-8")
    made = translated(
        {
            "model_name_or_path": "org/model", "model_revision": "a" * 40, "output_dir": "x",
            "train_file": str(rows), "validation_split_percentage": 5, "block_size": 64,
        }
    )  # fmt: skip
    assert slot(made, "model") == {"use": "model.hf", "path": "org/model", "revision": "a" * 40}
    assert slot(made, "data") == {
        "use": "data.chat", "files": [str(rows)], "sequence_length": 64,
        "heldout_fraction": 0.05,
    }  # fmt: skip
    other = translated({"model_name_or_path": "org/model", "output_dir": "x"})
    assert slot(other, "model") == {"use": "model.hf", "path": "org/model"}


def test_files_to_evaluate_on_come_before_a_fraction(tmp_path: Path) -> None:
    content = {"validation_file": "/held.txt", "validation_split_percentage": 5, "output_dir": "x"}
    made = translated(content)
    assert slot(made, "data") == {"use": "data.text", "heldout_files": ["/held.txt"]}
    assert outcome(made, "validation_split_percentage").why == "there are files to evaluate on"


def named(folder: Path, **arguments: Any) -> Translation:
    """Write TrainingArguments into `folder`, and the files that they name."""
    content = {"output_dir": "x", **arguments}
    file = ConfigFile(path=folder / "args.json", content=content)
    return HuggingFace().translate([file], Request(procs=2))


def test_files_that_arguments_name(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text('{"output_dir": "x", "deepspeed": "ds.json"}')
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {}}')
    both = from_files(tmp_path, "args.json", "ds.json")
    assert slot(both, "wrap") == {"use": "wrap.zero", "stage": 1}
    assert outcome(both, "deepspeed").why == "is read as a separate file"
    inline = named(tmp_path, deepspeed={"zero_optimization": {"stage": 1}})
    assert outcome(inline, "deepspeed.zero_optimization.stage").to == {"wrap.stage": 1}
    sharded = named(tmp_path, fsdp=True, fsdp_config={"reshard_after_forward": False})
    assert slot(sharded, "wrap") == {"use": "wrap.fsdp", "sharding": "shard_grad_op"}
    off = named(tmp_path, fsdp_config={"reshard_after_forward": False})
    assert slot(off, "wrap") == {"use": "wrap.ddp"}
    assert outcome(off, "fsdp_config").why == "is not read: fsdp is not set"
    old = named(tmp_path, fsdp="full_shard auto_wrap offload")
    assert slot(old, "wrap") == {"use": "wrap.fsdp", "cpu_offload": True}
    missing = named(tmp_path, deepspeed="none.json")
    assert missing.recipe is None
    assert left_out(missing) == {"deepspeed": "names another file"}
    assert outcome(missing, "deepspeed").hint.startswith("give it too: pipe import ")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"num_processes": 2}, "accelerate config"),
        ({"mixed_precision": "bf16", "num_machines": 1, "use_cpu": True}, "accelerate config"),
        ({"use_cpu": True, "num_machines": 1, "main_process_port": 29500}, None),
        ({"fp16": True, "fsdp_config": {"fsdp_version": 2}}, None),
        ({"fsdp": True, "fsdp_config": {"fsdp_version": 2}}, "transformers TrainingArguments"),
        ({"gradient_accumulation_steps": 4}, None),
        ({"gradient_accumulation_steps": 4, "seed": 1}, None),  # files of many tools have these
        ({"learning_rate": 1e-4, "weight_decay": 0.1, "max_steps": 5, "seed": 1}, None),
        ({"gradient_accumulation_steps": 4, "optim": "x"}, "transformers TrainingArguments"),
        ({"gradient_accumulation_steps": 4, "bf16": {"enabled": True}}, "DeepSpeed configuration"),
    ],
)
def test_a_kind_shows_by_a_key_that_it_alone_has(content: dict[str, Any], kind: str | None) -> None:
    assert HuggingFace().kind(content) == kind
    if kind is None:
        file = ConfigFile(path=Path("launch.yaml"), content=content)
        with pytest.raises(UsageError, match=r"launch\.yaml: its keys do not show") as refusal:
            choose([file], [HuggingFace()])
        assert "an accelerate config has `distributed_type`" in str(refusal.value)


@pytest.mark.parametrize("kind", TABLES)
@settings(
    max_examples=times(quick=60, full=600), phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(data=st.data())
def test_every_key_has_an_outcome(kind: str, data: st.DataObject) -> None:
    content = data.draw(contents(TABLES[kind]))
    translator = HuggingFace()
    assume(translator.kind(content) == kind)
    made = translator.translate([ConfigFile(path=Path("c.json"), content=content)], Request())
    assert_every_key_has_an_outcome(content, made)


def test_what_saves_memory_and_time_is_translated() -> None:
    arguments = {
        "learning_rate": 1e-4, "max_steps": 2, "per_device_train_batch_size": 1,
        "gradient_checkpointing": True, "torch_compile": True, "torch_compile_mode": "max-autotune",
        "use_liger_kernel": True, "report_to": [],
    }  # fmt: skip
    made = translated(arguments)
    assert left_out(made) == {}
    model = slot(made, "model")
    assert model["activation_checkpointing"] == {}
    assert model["compile"] == {"mode": "max-autotune"}
    assert model["kernels"] == "liger"
    sharding = {
        "distributed_type": "FSDP", "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True},
    }  # fmt: skip
    assert slot(translated(sharding), "model")["activation_checkpointing"] == {}


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ({"optim": "adamw_torch"}, {"use": "optimizer.adamw"}),
        ({"optim": "adamw_8bit"}, {"use": "optimizer.adamw", "moments": "8bit"}),
        ({"optim": "PAGED_ADAMW_8BIT"}, {"use": "optimizer.adamw", "moments": "8bit"}),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.2},
            },
            {"schedule": "cosine", "final_lr_ratio": 0.2},
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
            {"schedule": "constant", "warmup_steps": 10},
        ),
    ],
)  # fmt: skip
def test_rules_and_schedules(said: dict[str, Any], fields: dict[str, Any]) -> None:
    made = translated({"output_dir": "x", **said})
    assert not left_out(made)
    optimizer = slot(made, "optimizer")
    for name, value in fields.items():
        assert optimizer[name] == (pytest.approx(value) if isinstance(value, float) else value)
    assert "eps" not in optimizer


SFT = {"output_dir": "x", "use_peft": True, "lora_target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ({}, {"rank": 16, "alpha": 32.0, "dropout": 0.05, "targets": "all-linear"}),
        (
            {
                "lora_r": 8, "lora_alpha": 4, "lora_dropout": 0, "use_rslora": True,
                "lora_target_modules": ["q_proj", "v_proj"], "lora_modules_to_save": ["lm_head"],
                "lora_target_parameters": ["experts.down_proj"],
            },
            {
                "rank": 8, "alpha": 4, "dropout": 0, "scaling": "rslora",
                "targets": ["q_proj", "v_proj"], "train_also": ["*lm_head.*"],
                "target_parameters": ["experts.down_proj"],
            },
        ),
        (
            {"load_in_4bit": True, "use_dora": True},
            {"rank": 16, "alpha": 32.0, "dropout": 0.05, "targets": "all-linear", "dora": True,
             "quantize": "nf4"},
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "lora_dropout": 0.0},
            {"rank": 16, "alpha": 32.0, "dropout": 0.0, "targets": "all-linear",
             "quantize": "fp4"},
        ),
    ],
)  # fmt: skip
def test_adapters(said: dict[str, Any], fields: dict[str, Any]) -> None:
    made = translated({**SFT, **said})
    assert not left_out(made)
    assert slot(made, "adapter") == {"use": "adapter.lora", **fields}
    assert list(made.recipe["stages"])[:3] == ["model", "adapter", "precision"]  # type: ignore[index]


def test_layers_that_peft_would_have_chosen_have_to_be_said() -> None:
    made = translated({"output_dir": "x", "use_peft": True})
    assert "adapter.targets" in made.missing


def test_without_an_adapter() -> None:
    said = {"output_dir": "x", "lora_r": 8, "load_in_4bit": True}
    made = translated({**said, "use_peft": False})
    assert left_out(made) == {"load_in_4bit": "weights that are trained are not held in 4 bits"}
    assert outcome(made, "lora_r").outcome == "default"
    assert "adapter" not in made.recipe["stages"]  # type: ignore[index]
    open_question = translated(said)  # LoRA to its author, nothing to TRL
    assert open_question.recipe is None
    assert left_out(open_question)["lora_r"] == "means LoRA, or nothing without use_peft"


def test_data_sets_on_the_hub() -> None:
    rows = {"dataset_name": "owner/chats", "dataset_config": "en", "dataset_test_split": "test"}
    made = translated({"output_dir": "x", **rows})
    assert not left_out(made)
    source = {"dataset": "owner/chats", "config": "en"}
    assert slot(made, "data") == {
        "use": "data.chat",
        "sources": [{**source, "split": "train"}],
        "heldout_sources": [{**source, "split": "test"}],
    }
    text = translated({"output_dir": "x", "dataset_name": "owner/books", "block_size": 512})
    assert slot(text, "data")["use"] == "data.text"
    local = translated({"output_dir": "x", **rows}, data=["a.txt"])
    assert "sources" not in slot(local, "data")
    assert not left_out(local)


@pytest.mark.parametrize(
    ("row", "use"),
    [('{"text": "a"}', "data.text"), ('{"prompt": "a", "completion": "b"}', "data.chat")],
)
def test_a_data_set_in_a_folder(tmp_path: Path, row: str, use: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{row}\n")
    (tmp_path / "README.md").write_text("# rows\n")
    given = {"output_dir": "x", "dataset_name": str(tmp_path), "dataset_test_split": "test"}
    made = translated(given)
    data = slot(made, "data")
    assert (data["use"], data["files"]) == (use, [f"{tmp_path}/*.jsonl"])
    assert "sources" not in data
    assert left_out(made)["dataset_test_split"] == "files are read as a whole"


def test_what_deepspeed_does_unless_told() -> None:
    engine = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "fp16": {"enabled": True}}
    made = translated(engine)
    optimizer = slot(made, "optimizer")
    assert optimizer["schedule"] == "constant"
    assert (optimizer["weight_decay"], optimizer["decay_all"]) == (0.0, True)
    assert slot(made, "precision")["loss_scale_growth_interval"] == 1000
    for kind, more in (("WarmupLR", {}), ("WarmupCosineLR", {"final_lr_ratio": 1e-4})):
        scheduled = slot(translated({**engine, "scheduler": {"type": kind}}), "optimizer")
        assert scheduled["warmup_steps"] == 1000
        assert scheduled.get("final_lr_ratio") == more.get("final_lr_ratio")


def test_deepspeed_s_optimizer_decays_everything_under_the_trainer_too() -> None:
    engine = {"optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}}}
    optimizer = slot(translated({"output_dir": "x", "weight_decay": 0.1}, engine), "optimizer")
    assert (optimizer["weight_decay"], optimizer["decay_all"]) == (0.1, True)
    assert optimizer["schedule"] == "linear"


@pytest.mark.parametrize("key", ["hub_token", "push_to_hub_token", "use_auth_token"])
def test_secrets_are_shown_nowhere(key: str) -> None:
    made = translated({"output_dir": "out", key: "hf_0123456789"})
    assert outcome(made, key).outcome == "refused"
    assert "HF_TOKEN" in outcome(made, key).hint
    shown = [*table(made), json.dumps(as_json(made)), recipe_text(made)]
    assert "hf_0123456789" not in "\n".join(shown)
