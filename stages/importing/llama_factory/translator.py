"""LLaMA-Factory's recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.importing import ConfigFile
from pipeline.utils import did_you_mean
from stages.importing import rules
from stages.importing.draft import Draft
from stages.importing.reader import purpose, trainer, unread
from stages.importing.rules import RuleResult, Table, outcome, rule, sets, table
from stages.importing.sources import HELD, TRAIN, Style
from stages.importing.tools import LLAMA_FACTORY
from stages.importing.trackers import SWANLAB
from stages.importing.trainer import SHARED, TRAINER
from stages.importing.translator import RecipeTranslator


def _adapter_folder(value: Any) -> str:
    if len(rules.names(value)) != 1:
        raise rules.WrongValueError("merges several adapters !! merge them first")
    return rules.path(value)


TABLE: Table = {
    **SWANLAB, **TRAINER,
    **table("""
    pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing ld_alpha kto_chosen_weight
    kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
    ppo_whiten_rewards reward_model_type ref_model_quantization_bit reward_model_quantization_bit
    ref_model_adapters reward_model_adapters: ignored is read only by the preference and reward \
        stages
    ref_model reward_model: refused training on preferences or rewards is not supported by recipes \
        !!
    use_llama_pro mixture_of_depths shift_attn pissa_init use_mca use_kt use_hyper_parallel
    freeze_language_model: refused no recipe trains like this !!
    pissa_iter pissa_convert: ignored follows pissa_init
    hyper_parallel_args: ignored follows use_hyper_parallel
    kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num
    kt_lora_expert_intermediate_size: ignored follows use_kt
    freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout oft_rank
    oft_block_size oft_target: ignored follows finetuning_type
    use_dft_loss use_asft_loss use_eaft_loss: refused the loss is the mean cross-entropy of the \
        target tokens !!
    asft_alpha: ignored follows use_asft_loss | eaft_alpha: ignored follows use_eaft_loss
    use_galore use_apollo use_badam use_adam_mini use_muon: foreign refused no recipe has this \
        optimizer
    galore_target galore_rank galore_update_interval galore_scale galore_proj_type \
        galore_layerwise: ignored follows use_galore
    apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
    apollo_scale_type apollo_layerwise apollo_scale_front: ignored follows use_apollo
    badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio
    badam_mask_mode badam_verbose: ignored follows use_badam
    use_unsloth use_reentrant_gc use_v1_kernels use_kv_cache offload_folder print_param_status
    tokenized_path data_shared_file_system plot_loss include_effective_tokens_per_second media_dir
    adapter_folder: ignored changes speed or memory, no number
    freeze_vision_tower freeze_multi_modal_projector image_max_pixels image_min_pixels
    image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen
    use_audio_in_video audio_sampling_rate: ignored is about images, videos and sound
    infer_backend infer_dtype export_dir export_size export_device export_quantization_bit
    export_quantization_dataset export_quantization_nsamples export_quantization_maxlen
    export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager
    vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config
    sglang_lora_backend generation_max_length generation_num_beams do_sample temperature top_p top_k
    num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens: ignored is \
        read by another command than train

    model_name_or_path: @model_name_or_path | model_revision: @model_revision
    trust_remote_code: @trust_remote_code
    adapter_name_or_path: adapter.start_from adapter_folder
    flash_attn: model.attention disabled=eager, sdpa, fa2=flash_attention_2, fa3=flash_attention_3 \
        off=auto
    enable_liger_kernel: @use_liger_kernel
    disable_gradient_checkpointing: ignored model.activation_checkpointing says it
    create_new_adapter: refused merges the adapter that it is given !! merge it first
    use_unsloth_gc: model.activation_checkpointing.offload = true
    train_from_scratch: model.init = random | moe_aux_loss_coef: train.router_loss number
    upcast_layernorm upcast_lmhead_output: refused one dtype computes the whole model -- set \
        precision.compute
    rope_scaling: refused the model is as its config says -- change the model's config.json
    resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens: \
        @new_tokens
    init_special_tokens: ignored follows add_special_tokens
    quantization_bit: if 4 then quantize 4=true else never weights are held whole or in 4 bits -- \
        set quantization_bit: 4

    quantization_type: @bnb_4bit_quant_type | quantization_method: always bnb, bitsandbytes !!
    double_quantization: @bnb_4bit_use_double_quant
    quantization_device_map: ignored follows quantization_bit

    stage: if pt|sft then ignored data.chat or data.text trains so else never {0!r} trains on \
        preferences or rewards, which is not supported by recipes !! use stage: sft or pt, or \
        train with TRL
    finetuning_type: if lora|full then adapter lora=true, full=false else never no recipe trains \
        by {0!r} !! use lora or full
    pure_bf16: precision.master = bf16 | lora_rank: @lora_r | lora_alpha: @lora_alpha
    lora_dropout: @lora_dropout | use_rslora: @use_rslora | use_dora: @use_dora
    lora_target: adapter.targets targets | additional_target: @lora_modules_to_save
    warmup_ratio: @warmup_ratio | loraplus_lr_ratio: optimizer.groups lora_b
    loraplus_lr_embedding: ignored no embedding has an adapter
    early_stopping_steps: train.early_stopping.patience positive
    evaluation_strategy: @eval_strategy | disable_shuffling: train.shuffle = false
    fp8: model.fp8 = {} | fp8_backend: always torchao, auto
    fp8_enable_fsdp_float8_all_gather: refused parameters are sent as they are

    template: @named_template | tool_format default_system: @template_setting
    enable_thinking: always true -- set it in the rows' chat_template_kwargs
    preserve_thinking: always false -- set it in the rows' chat_template_kwargs
    cutoff_len: cutoff positive | packing: packing truth | neat_packing: neat truth
    train_on_prompt: data.loss = all | mask_history: data.loss = last
    val_size: data.heldout_fraction fraction off=0,"0","0.0"
    max_samples: refused rows are taken as the files have them -- change the files
    mix_strategy: always concat, interleave_over -- use interleave_over, with weights
    streaming: ignored rows come in the order of every run | buffer_size: ignored follows streaming
    dataset_dir: ignored is where the files of the data sets are
    ignore_pad_token_for_loss: always true
    """, **SHARED | {
        "targets": lambda value: (
            "all-linear" if rules.names(value) == ["all"] else rules.names(value)),
        "adapter_folder": _adapter_folder,
    }),
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    "finetuning_type": "lora", "lora_rank": 8, "lora_dropout": 0.0, "lora_target": "all",
    "cutoff_len": 2048,
}  # fmt: skip
"""Defaults of LLaMA-Factory that differ from the recipe's."""
INFO_KIND = "data sets of LLaMA-Factory"


class LlamaFactory(RecipeTranslator):
    """A recipe of LLaMA-Factory, with its dataset_info.json and the DeepSpeed JSON of its own."""

    name = "llama_factory"
    tool = LLAMA_FACTORY
    signs = "a recipe of LLaMA-Factory has `finetuning_type` or `cutoff_len`"
    table = TABLE
    companies = ({}, {"eval_strategy": "steps"})

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return INFO_KIND if _is_info(content) else super().kind(content)

    def read(self, draft: Draft, file: ConfigFile) -> None:
        content, running = {**file.content}, file.content.get("stage") == "pt"
        folder = content.get("dataset_dir", "data")
        files = [(each.path.name, each.content) for each in draft.files if _is_info(each.content)]
        inline = [(file.path.name, folder)] if isinstance(folder, Mapping) else []
        entries: Entries = {
            name: (info, entry)
            for info, content in (*inline, *files)
            for name, entry in content.items()
            if isinstance(entry, Mapping)
        }
        own = {
            **unread(("template", running and content.get("template"),
                      "stage: pt takes the text as it is")),
            **purpose(content, "do_predict", "predict_with_generate", "do_eval"),
            **trainer(draft, file),
        }  # fmt: skip
        named: dict[str, str] = {}
        for key, kind in NAMES.items():
            if content.get(key):
                own[key] = _naming(draft, file, entries, folder)
                with contextlib.suppress(rules.WrongValueError):
                    each = enumerate(rules.names(content[key]))
                    named |= {f"{kind}{number}.": name for number, name in each}
        if weighed := str(content.get("mix_strategy")) == "interleave_over":
            own |= _weights(content)
        draft.read(file.path.name, content, {**TABLE, **own})
        for one, name in named.items():
            if weighed and one.startswith(TRAIN):
                draft.default(f"{one}weight", 1.0, "interleave_over takes turns")
            if folder == "ONLINE":
                draft.default(f"{one}path", name, f"dataset in {file.path.name}")
            if folder == "ONLINE" or name in entries:
                where = folder if isinstance(folder, str) else "data"
                info, entry = ("", {}) if folder == "ONLINE" else entries[name]
                rows = _rows(draft, entry, one, where, running=running)
                draft.read(info, entry, rows, f"{name}.", one)
        for name, (info, entry) in entries.items():
            if name not in named.values():
                other = outcome("ignored the recipe names other data sets")
                draft.enter(info, name, entry, other)
        draft.set_defaults(DEFAULTS, TABLE, OWN)
        rank = draft.value("adapter.rank")
        draft.default("adapter.alpha", float(2 * rank), "twice lora_rank, LLaMA-Factory's default")
        draft.default("data.loss", "assistant", "LLaMA-Factory trains on what the assistant says")
        again = rules.is_off(content.get("disable_gradient_checkpointing"))
        draft.default("model.activation_checkpointing", {}, OWN, when=again)
        pure = draft.given("precision.master")
        draft.default("precision.compute", "bf16", "pure_bf16 in the recipe", when=pure)
        _lengths(draft, running=running)


def _lengths(draft: Draft, *, running: bool) -> None:
    """Decide what is packed, and how long a sample is."""
    neat = draft.value("neat", False)
    packed = neat or draft.value("packing", False)
    length = draft.value("cutoff") - (1 if packed else 0)
    why = "LLaMA-Factory packs one token less than cutoff_len" if packed else OWN
    draft.rename("cutoff", "data.sequence_length", content=length)
    draft.default("data.sequence_length", length, why)
    if running:
        draft.default("data.prepend_bos", False, "LLaMA-Factory joins texts without a start token")
        draft.drop("refused data.text joins the rows of a text -- leave packing out", "packing",
                    when=draft.given("packing") and not packed)  # fmt: skip
    elif neat:
        draft.rename("neat", "data.packing")
        draft.drop("ignored follows neat_packing", "packing")
    elif packed:
        why = "refused rows of one sample never see each other -- set neat_packing: true"
        draft.drop(why, "packing")


INFO = "dataset_info.json"
ADDRESSES = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
"""Keys of which every entry has one."""
NAMES = {"dataset": TRAIN, "eval_dataset": HELD}
"""Keys with names of data sets -> beginning of their facts."""
PROBS = "interleave_probs"
STYLES = {"alpaca": Style(form="alpaca"), "sharegpt": Style(), "openai": Style()}
TAGS = {
    "messages": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                 "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"},
    "sharegpt": {"role_tag": "from", "content_tag": "value", "user_tag": "human",
                 "assistant_tag": "gpt", "observation_tag": "observation",
                 "function_tag": "function_call", "system_tag": "system"},
}  # fmt: skip
"""Names of roles and contents, as OpenAI and as ShareGPT write them."""
OWN = "LLaMA-Factory's default"
Entries: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name of a data set -> file that has its entry, and the entry."""


def _is_info(content: Mapping[str, Any]) -> bool:
    """Return whether it is the content of a dataset_info.json."""
    entries = content.values()
    return bool(entries) and all(
        isinstance(entry, Mapping) and ADDRESSES & entry.keys() for entry in entries
    )


def _naming(draft: Draft, file: ConfigFile, entries: Entries, folder: Any) -> rules.Rule:
    """Return the rule of a key that names data sets."""

    def named(value: Any) -> RuleResult:
        missing = [name for name in rules.names(value) if name not in entries]
        if draft.request.data:
            return outcome("ignored --data replaces it")
        if folder == "ONLINE" or not missing:
            return outcome("ignored the keys of each data set say it")
        if entries:
            hint = did_you_mean(missing[0], [*entries])
            return outcome(f"refused {INFO} has no entry {missing[0]!r} !! {hint}".rstrip())
        where = f"{folder if isinstance(folder, str) else 'data'}/{INFO}"
        hint = f"give it too: pipe import {file.path} {where}"
        return outcome(f"refused names entries of {INFO} !! {hint}")

    return named


def _weights(content: dict[str, Any]) -> Table:
    """Return the rules for the share of each data set, and give them a key each in the content."""
    value = content.get(PROBS)
    shares = value.split(",") if isinstance(value, str) else value
    if not isinstance(shares, list) or not shares:
        return {PROBS: rule(f"refused must be a list of shares, not {value!r}")} if value else {}
    del content[PROBS]
    content |= {f"{PROBS}[{number}]": share for number, share in enumerate(shares)}
    return {f"{PROBS}[{number}]": rule(f"{TRAIN}{number}.weight number")
            for number in range(len(shares))}  # fmt: skip


ENTRY = table("""
    hf_hub_url: .path | subset: .config | split: .split
    ms_hub_url om_hub_url script_url cloud_file_name:
        refused data comes from files and the hub of Hugging Face -- download it
    formatting: .style styles !! use alpaca or sharegpt
    folder num_samples: refused files are read as a whole -- write those rows to a separate file
    ranking columns.chosen columns.rejected columns.kto_tag:
        refused training on preferences is not supported by recipes !!
    [columns]
    prompt: always instruction !! rename the column in the data
    query: always input !! rename the column in the data
    response: always output !! rename the column in the data
    history: always history !! rename the column in the data
    system: always system !! rename the column in the data
    tools: always tools !! rename the column in the data
    messages: .form conversations=sharegpt !! rename the column in the data
    images videos audios: refused recipes train on text only !!
""", styles=STYLES)  # fmt: skip
"""Keys of an entry in dataset_info.json."""
OPENAI = table("messages: .form messages, conversations=sharegpt !! rename the column in the data")
RUNNING = table("formatting: ignored stage: pt takes the text | prompt: .text_key")


def _rows(draft: Draft, entry: Mapping[str, Any], one: str, folder: str, *, running: bool) -> Table:
    """Return the rules of an entry, and set its defaults. `running` text is trained on as it is."""
    style = Style(running=True) if running else STYLES["alpaca"]
    draft.default(f"{one}style", style, "stage: pt" if running else OWN)
    shape = ("text_key", "instruction") if running else ("form", "sharegpt")
    draft.default(f"{one}{shape[0]}", shape[1], OWN)
    given = entry.get("tags")
    openai = isinstance(given, Mapping) and given.get("role_tag") == "role"
    tags = TAGS["messages" if openai else "sharegpt"].items()
    mirror = rule("ignored is also on the hub of Hugging Face")
    prompt = {"prompt": RUNNING["prompt"]} if running else {}
    return {
        **ENTRY,
        **(dict.fromkeys(("ms_hub_url", "om_hub_url"), mirror) if "hf_hub_url" in entry else {}),
        **({"formatting": RUNNING["formatting"]} if running else {}),
        "file_name": sets(".path", lambda name: str(Path(folder, name).absolute())),
        "columns": {**ENTRY["columns"], **(OPENAI if openai else {}), **prompt},
        "tags": {key: rule(f"always {tag} !! rename it in the data") for key, tag in tags},
    }
