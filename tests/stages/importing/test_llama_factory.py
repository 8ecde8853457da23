"""LLaMA-Factory's recipes: published ones, and each key that only they have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.importing.translator import ConfigFile, Translation
from stages.importing.llama_factory.translator import LlamaFactory
from tests.stages.importing.configs.llama_factory import (
    DPO,
    FSDP,
    FULL,
    INFO,
    LORA,
    PRETRAIN,
    QLORA,
)
from tests.stages.importing.support import (
    assert_fields,
    by_outcome,
    imported,
    left_out,
    outcome,
    outcomes,
    slot,
)

FILE = ConfigFile(path=Path("data/dataset_info.json"), content=INFO)
BASE = {
    "model_name_or_path": "org/model", "dataset": "identity", "finetuning_type": "full",
    "output_dir": "x",
}  # fmt: skip


def made(*, info: Mapping[str, Any] = INFO, **said: Any) -> Translation:
    file = ConfigFile(path=Path("data/dataset_info.json"), content=info)
    return imported(LlamaFactory(), {**BASE, **said}, file, procs=2)


def here(name: str) -> str:
    """Return the path of a file of data, as LLaMA-Factory finds it."""
    return str(Path("data", name).absolute())


def test_a_published_lora_recipe() -> None:
    found = imported(LlamaFactory(), LORA, FILE, procs=2)
    assert found.recipe == {
        "name": "sft",
        "launch": {"procs": 2},
        "seed": 42,
        "stages": {
            "model": {
                "use": "model.hf", "path": "meta-llama/Meta-Llama-3-8B-Instruct",
                "activation_checkpointing": {},
                "trust_remote_code": True,
            },
            "adapter": {
                "use": "adapter.lora", "rank": 8, "alpha": 16.0, "dropout": 0.0,
                "targets": "all-linear",
            },
            "precision": {"use": "precision.policy", "compute": "bf16"},
            "data": {
                "use": "data.chat", "form": "alpaca", "loss": "assistant", "sequence_length": 2048,
                "files": [here("identity.json"), here("alpaca_en_demo.json")],
            },
            "optimizer": {
                "use": "optimizer.adamw", "lr": 1e-4, "schedule": "cosine", "warmup_ratio": 0.1,
                "weight_decay": 0.0, "max_grad_norm": 1.0,
            },
            "wrap": {"use": "wrap.ddp"},
            "checkpoint": {"use": "checkpoint.sharded", "every": 500, "keep": None},
            "train": {
                "use": "train.causal_lm", "epochs": 3.0, "global_batch_size": 16,
                "micro_batch_size": 1, "log_every": 10,
            },
            "consolidate": {"use": "consolidate.stream"},
            "export": {"use": "export.safetensors"},
        },
    }  # fmt: skip
    assert left_out(found) == {
        "template": "rows are laid out by the tokenizer's own chat template",
        "max_samples": "rows are taken as the files have them",
    }


def test_the_outcome_of_every_key_of_a_published_recipe() -> None:
    found = by_outcome(imported(LlamaFactory(), LORA, FILE, procs=2))
    assert found == {
        "default": {
            "stage", "do_train", "dataset", "overwrite_cache", "preprocessing_num_workers",
            "plot_loss", "overwrite_output_dir", "ddp_timeout",
        } | ({*INFO} - {"identity", "alpaca_en_demo"}),
        "refused": {"template", "max_samples"},
        "translated": {
            "model_name_or_path", "trust_remote_code", "finetuning_type", "lora_rank",
            "lora_target", "cutoff_len", "output_dir", "logging_steps", "save_steps",
            "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
            "num_train_epochs", "lr_scheduler_type", "warmup_ratio", "bf16", "identity.file_name",
            "alpaca_en_demo.file_name",
        },
    }  # fmt: skip


def test_a_published_recipe_for_all_weights_with_deepspeed() -> None:
    engine = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto"},
    }  # fmt: skip
    file = ConfigFile(path=Path("ds_z3_config.json"), content=engine)
    found = imported(LlamaFactory(), FULL, FILE, file, procs=4)
    assert slot(found, "wrap") == {
        "use": "wrap.zero", "stage": 3, "sub_group_size": 1_000_000_000,
    }  # fmt: skip
    assert "adapter" not in found.recipe["stages"]  # type: ignore[index]
    assert slot(found, "train")["global_batch_size"] == 8
    assert set(left_out(found)) == {"template", "max_samples"}
    assert imported(LlamaFactory(), FULL, FILE).recipe is None


def test_a_published_recipe_that_accelerate_starts() -> None:
    launch = ConfigFile(path=Path("fsdp_config.yaml"), content=FSDP)
    found = imported(LlamaFactory(), QLORA, FILE, launch)
    assert slot(found, "adapter") == {
        "use": "adapter.lora", "quantize": "nf4", "rank": 8, "alpha": 16.0, "dropout": 0.0,
        "targets": ["q_proj", "v_proj"],
    }  # fmt: skip
    assert slot(found, "wrap") == {
        "use": "wrap.fsdp", "units": "block", "cpu_offload": True, "sharding": "full_shard",
        "forward_prefetch": 0,
    }  # fmt: skip
    assert slot(found, "precision") == {"use": "precision.policy", "compute": "fp16"}
    train = slot(found, "train")
    assert (train["global_batch_size"], train["eval_every"]) == (16, 500)
    assert slot(found, "data")["heldout_fraction"] == 0.1
    assert set(left_out(found)) == {"template", "max_samples"}


def test_a_published_recipe_for_text() -> None:
    found = imported(LlamaFactory(), PRETRAIN, FILE, procs=1)
    assert slot(found, "data") == {
        "use": "data.text", "files": [here("c4_demo.jsonl")], "text_key": "text",
        "prepend_bos": False, "sequence_length": 2048,
    }  # fmt: skip
    assert left_out(found) == {"max_samples": "rows are taken as the files have them"}


def test_a_published_recipe_for_preferences_is_refused() -> None:
    found = imported(LlamaFactory(), DPO, FILE)
    assert found.recipe is None
    assert left_out(found)["stage"] == (
        "'dpo' trains on preferences or rewards, which is not supported by recipes"
    )
    assert left_out(found)["dpo_en_demo.ranking"] == (
        "training on preferences is not supported by recipes"
    )
    assert outcomes(found)["pref_beta"] == "default"


def test_what_a_recipe_leaves_out_is_as_in_llama_factory() -> None:
    found = imported(
        LlamaFactory(), {"template": None, "cutoff_len": 1000, "dataset": "identity"}, FILE, procs=1
    )
    assert slot(found, "adapter") == {
        "use": "adapter.lora", "rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": "all-linear",
    }  # fmt: skip
    assert slot(found, "model") == {"use": "model.hf", "activation_checkpointing": {}}
    assert slot(found, "precision")["compute"] == "fp32"
    assert slot(found, "train")["global_batch_size"] == 8
    assert slot(found, "optimizer")["lr"] == 5e-5
    assert slot(made(), "data")["sequence_length"] == 2048


@pytest.mark.parametrize("stage", ["rm", "ppo", "dpo", "kto"])
def test_stages_that_no_recipe_has(stage: str) -> None:
    found = made(stage=stage)
    assert found.recipe is None
    assert outcome(found, "stage").hint == "use stage: sft or pt, or train with TRL"


@pytest.mark.parametrize(
    "said",
    [
        {"finetuning_type": "freeze"}, {"finetuning_type": "oft"}, {"use_llama_pro": True},
        {"pissa_init": True}, {"use_dft_loss": True}, {"mixture_of_depths": "convert"},
        {"ref_model": "x"}, {"freeze_language_model": True}, {"use_mca": True},
        {"quantization_method": "hqq"}, {"adapter_name_or_path": "a,b"},
        {"adapter_name_or_path": "a", "create_new_adapter": True}, {"tp_size": 2},
    ],
)  # fmt: skip
def test_what_no_recipe_does_without(said: dict[str, Any]) -> None:
    found = made(**said)
    assert found.recipe is None
    assert all(each.why for each in found.outcomes if each.blocks)


@pytest.mark.parametrize(
    "said",
    [
        {"use_galore": True}, {"use_muon": True}, {"optim": "adafactor"}, {"quantization_bit": 8},
        {"packing": True}, {"val_size": 500}, {"default_system": "Be kind."}, {"rope_scaling": 2},
        {"enable_thinking": False}, {"mix_strategy": "interleave_under"}, {"max_samples": 10},
        {"add_special_tokens": "<x>"}, {"upcast_layernorm": True}, {"neftune_noise_alpha": 5},
        {"resume_from_checkpoint": "x"}, {"fp8": True, "fp8_backend": "te"},
    ],
)  # fmt: skip
def test_what_changes_the_numbers_is_refused(said: dict[str, Any]) -> None:
    found = made(**said)
    assert found.recipe is not None
    assert "refused" in outcomes(found).values()


@pytest.mark.parametrize(
    ("said", "name", "fields"),
    [
        ({"finetuning_type": "lora", "lora_rank": 32}, "adapter", {"rank": 32, "alpha": 64.0}),
        (
            {"finetuning_type": "lora", "lora_target": "q_proj,v_proj", "lora_alpha": 4,
             "additional_target": "embed_tokens,lm_head", "use_dora": True},
            "adapter",
            {"targets": ["q_proj", "v_proj"], "alpha": 4.0, "dora": True,
             "train_also": ["*embed_tokens.*", "*lm_head.*"]},
        ),
        (
            {"finetuning_type": "lora", "quantization_bit": 4, "quantization_type": "fp4"},
            "adapter", {"quantize": "fp4"},
        ),
        ({"finetuning_type": "lora", "adapter_name_or_path": "/old"}, "adapter",
         {"start_from": "/old"}),
        ({"pure_bf16": True}, "precision", {"compute": "bf16", "master": "bf16"}),
        ({"flash_attn": "fa2"}, "model", {"attention": "flash_attention_2"}),
        ({"flash_attn": "auto"}, "model", {"attention": None}),
        ({"disable_gradient_checkpointing": True}, "model", {"activation_checkpointing": None}),
        ({"use_unsloth_gc": True}, "model", {"activation_checkpointing": {"offload": True}}),
        ({"enable_liger_kernel": True}, "model", {"kernels": "liger"}),
        ({"train_on_prompt": True}, "data", {"loss": "all"}),
        ({"mask_history": True}, "data", {"loss": "last"}),
        ({"val_size": 0.1}, "data", {"heldout_fraction": 0.1}),
        # LLaMA-Factory leaves room for one token of padding
        ({"neat_packing": True, "cutoff_len": 4096}, "data",
         {"packing": True, "sequence_length": 4095}),
        ({"neat_packing": True, "packing": True}, "data",
         {"packing": True, "sequence_length": 2047}),
        ({"eval_dataset": "glaive_toolcall_en"}, "data",
         {"heldout_sources": [{"dataset": "llamafactory/glaive_toolcall_en"}]}),
        ({"moe_aux_loss_coef": 0.01}, "train", {"router_loss": 0.01}),
        ({"disable_shuffling": True}, "train", {"shuffle": False}),
        ({"loraplus_lr_ratio": 16}, "optimizer",
         {"groups": [{"match": ["*.lora_B.*"], "lr_ratio": 16.0}]}),
    ],
)  # fmt: skip
def test_keys(said: dict[str, Any], name: str, fields: dict[str, Any]) -> None:
    assert_fields(made(**said), name, fields)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("glaive_toolcall_en", {"form": "sharegpt"}),
        ("open_thoughts", {"form": "messages"}),
        (
            "ultrachat_200k",
            {"form": "messages",
             "sources": [{"dataset": "HuggingFaceH4/ultrachat_200k", "split": "train_sft"}]},
        ),
    ],
)  # fmt: skip
def test_published_data_sets(name: str, data: dict[str, Any]) -> None:
    assert_fields(made(dataset=name), "data", data)


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        (INFO["openorca"], "columns.prompt"),
        (INFO["dpo_en_demo"], "ranking"),
        ({"file_name": "x.json", "columns": {"images": "images"}}, "columns.images"),
        ({"file_name": "x.json", "formatting": "other"}, "formatting"),
        ({"file_name": "x.json", "formatting": "sharegpt", "tags": {"user_tag": "me"}},
         "tags.user_tag"),
        # ShareGPT's names of roles under OpenAI's key
        ({"file_name": "x.json", "formatting": "sharegpt", "columns": {"messages": "messages"}},
         "columns.messages"),
    ],
)  # fmt: skip
def test_data_sets_that_no_recipe_reads(entry: dict[str, Any], key: str) -> None:
    found = made(dataset="mine", info={"mine": entry})
    assert found.recipe is None
    assert f"mine.{key}" in left_out(found)


def test_a_whole_number_that_is_none_any_more_is_refused() -> None:
    found = made(finetuning_type="lora", lora_rank=1e300)
    assert outcomes(found)["lora_rank"] == "refused"


def test_data_from_elsewhere_is_left_to_fill_in() -> None:
    found = made(dataset="deepctrl")
    assert left_out(found) == {
        "deepctrl.ms_hub_url": "data comes from files and the hub of Hugging Face"
    }
    assert "data.files" in found.missing


def test_the_file_of_data_sets_is_given_too() -> None:
    alone = imported(LlamaFactory(), LORA)
    assert alone.recipe is None
    assert outcome(alone, "dataset").hint == (
        "give it too: pipe import recipe.yaml data/dataset_info.json"
    )
    elsewhere = imported(LlamaFactory(), {**LORA, "dataset_dir": "/sets"})
    assert outcome(elsewhere, "dataset").hint.endswith("/sets/dataset_info.json")
    wrong = made(dataset="identiy")
    assert wrong.recipe is None
    assert outcome(wrong, "dataset").why == "dataset_info.json has no entry 'identiy'"
    assert "identity" in outcome(wrong, "dataset").hint


def test_data_sets_without_their_file(tmp_path: Path) -> None:
    online = imported(
        LlamaFactory(), {**BASE, "dataset": "owner/rows", "dataset_dir": "ONLINE"}, procs=1
    )
    assert slot(online, "data")["sources"] == [{"dataset": "owner/rows"}]
    inline = imported(
        LlamaFactory(), {**BASE, "dataset_dir": {"identity": {"file_name": "i.json"}}}
    )
    assert slot(inline, "data")["files"] == [here("i.json")]
    text = tmp_path / "a.txt"
    text.write_text("a", encoding="utf-8")
    replaced = imported(LlamaFactory(), LORA, data=[str(text)])
    assert slot(replaced, "data")["files"] == [str(text)]
    assert outcome(replaced, "dataset").why == "--data replaces it"


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"dataset": 5}, "dataset"),
        ({"dataset": ["identity", 5]}, "dataset"),
        ({"mix_strategy": "interleave_over", "interleave_probs": 0.5}, "interleave_probs"),
        ({"mix_strategy": "interleave_over", "interleave_probs": "0.5,x"}, "interleave_probs[1]"),
    ],
)
def test_values_that_are_none(said: dict[str, Any], key: str) -> None:
    assert outcome(made(**said), key).outcome == "refused"


def test_held_out_rows_of_another_form() -> None:
    found = made(eval_dataset="open_thoughts", eval_strategy="steps")
    assert slot(found, "data").get("form") is None
    files = made(info={"a": {"file_name": "a.json"}, "b": {"file_name": "b.json"}},
                 dataset="a", eval_dataset="b", eval_strategy="steps")  # fmt: skip
    assert slot(files, "data")["form"] == "alpaca"
    assert slot(files, "data")["heldout_files"] == [here("b.json")]
    assert "data.heldout_fraction" not in files.missing


def test_scales_of_weights_in_4_bits() -> None:
    four = {"finetuning_type": "lora", "quantization_bit": 4}
    assert left_out(made(**four, double_quantization=False)) == {}
    assert "double_quantization" in left_out(made(**four, double_quantization=True))


def test_shares_of_data_sets() -> None:
    names = {"dataset": "glaive_toolcall_en,open_thoughts", "mix_strategy": "interleave_over"}
    found = made(**names, interleave_probs="0.7,0.3")
    assert [one["weight"] for one in slot(found, "data")["sources"]] == [0.7, 0.3]
    assert left_out(found) == {}
    assert [one["weight"] for one in slot(made(**names), "data")["sources"]] == [1.0, 1.0]
    concatenated = made(dataset=names["dataset"])
    assert [one["weight"] for one in slot(concatenated, "data")["sources"]] == [None, None]
    assert "data.sources.weight" in concatenated.missing
