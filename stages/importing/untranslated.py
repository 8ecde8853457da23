"""Keys of tools whose files are not imported, and what to do about keys whose files are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.importing import KeyOutcome
from stages.importing.rules import is_off, rows

KEYS = rows("""
    gpus num_gpus n_gpus devices nproc_per_node nprocs world_size: launch.procs
    nnodes num_nodes num_machines: launch.nodes | accelerator: launch.device
    max_restarts: launch.restarts.limit | rdzv_timeout: launch.timeouts.rendezvous
    ddp_timeout: launch.timeouts.collectives | lora peft peft_config: adapter.use
    qlora: adapter.quantize | completion_only_loss: data.loss | eval_on_start: train.eval_first
    strategy: wrap.use | max_epochs: train.epochs | accumulate_grad_batches: train.accumulation
    every_n_train_steps save_interval: checkpoint.every | local_batch_size: train.micro_batch_size
    max_norm clip_grad gradient_clip_val: optimizer.max_grad_norm
    data_parallel_shard_degree: wrap.shard_size
    tensor_parallel_degree tp_size tensor_model_parallel_size: wrap.tensor_parallel.size
    pipeline_parallel_degree pp_size pipeline_model_parallel_size: wrap.pipeline_parallel.size
    context_parallel_degree cp_size: wrap.context_parallel.size
    expert_parallel_degree ep_size expert_model_parallel_size: wrap.expert_parallel.size
    seq_len seq_length: data.sequence_length | keep_latest_k: checkpoint.keep
    train_iters: train.steps | save: checkpoint.folder | eval_interval: train.eval_every
    log_interval: train.log_every | lr_warmup_iters: optimizer.warmup_steps
""")
"""Keys of torchrun, SkyPilot, Lightning, accelerate, torchtitan, NeMo and Megatron, and of TRL
where the form of rows does not matter."""
STRATEGIES = {"ddp": "wrap.ddp", "fsdp": "wrap.fsdp", "deepspeed": "wrap.zero"}
"""Beginnings of names of strategies, as in Lightning's `deepspeed_stage_3`."""
ADVICE = rows("""
    resume_from_checkpoint load ckpt_path: leave it out: `pipe resume [RUN]` continues a run; for \
        another tool's checkpoint: pipe convert CHECKPOINT NEW --to canonical, then \
        checkpoint.start_from: NEW
    output_dir: leave it out: `pipe run RECIPE --run-dir {value}` names the folder of a run
    overwrite_output_dir: leave it out: each run has a new folder
    machine_rank main_process_ip main_process_port: leave it out: pipe run RECIPE --nodes NODES \
        --node-rank NUMBER --rdzv HOST:PORT
    dtype: write `compute: bf16` or `compute: fp16` in slot `precision`, the dtype to train in; \
        `dtype` of an export slot is for the exported weights
    deepspeed: its settings stand in slot `wrap` with `use: wrap.zero`: `pipe import config.yaml \
        {value}` translates both
    datasets: write `files: PATH`, or `sources: [{{dataset: OWNER/NAME, split: train}}]`
    batch_size: per device: `micro_batch_size: {value}`, over all: `global_batch_size: {value}`
    zero_optimization: its fields stand in slot `wrap` itself, as in `stage: 3`; pipe import \
        translates DeepSpeed's files
    nccl: here that is `collectives`
    per_device_eval_batch_size eval_batch_size eval_accumulation_steps: leave it out: evaluation \
        uses `micro_batch_size`
    eval_strategy:no evaluation_strategy:no: leave it out: without `eval_every`, only the end of \
        the training is evaluated
    bf16:no bfloat16:no: write `compute: fp32` in slot `precision`, where bf16 is the default
    logging_strategy: write `log_every` in slot `train`: steps between two lines
    model_init_kwargs: write its settings in slot `model`: `attention`, `revision`, ...
    label_smoothing_factor: leave it out: recipes have no label smoothing
    neftune_noise_alpha: leave it out: recipes have no noise on embeddings
    group_by_length: leave it out: recipes have no order by length; `packing: true` in slot `data` \
        avoids padding
    lora_bias: leave it out: recipes have no biases that are trained with an adapter
    eval_packing: leave it out: held-out rows are packed as the others
    padding_free: leave it out: `packing: true` in slot `data` avoids padding
    save_only_model: leave it out: a checkpoint has the whole training state, an export the model \
        only
""")
"""Key, or `key:value` -> what to do about it; of a key on its own, where the value is not off."""
ALWAYS = rows("""
    do_train save_safetensors lora_bias:none: leave it out: every recipe does this
    do_eval: leave it out: every recipe with held-out data is evaluated
    remove_unused_columns gradient_checkpointing_kwargs lora_inference_mode dataloader_pin_memory
    disable_tqdm logging_first_step dataset_num_proc ddp_backend log_level
    dataloader_persistent_workers: leave it out: a recipe has nothing like it, and the training \
        does not change
""")
"""As ADVICE, also for values that are off."""


def advice(key: str, value: Any) -> str:
    """Return what to do about a key in a recipe; empty if its outcome says it."""
    pair = f"{key}:{'no' if value is False else value}"
    found = ADVICE.get(pair) or ALWAYS.get(pair) or ALWAYS.get(key) or ADVICE.get(key, "")
    if found and is_off(value) and found is ADVICE.get(key):
        found = "leave it out: {value} is the default"
    shown = "..." if isinstance(value, Mapping | list) else value
    return found.format(value=shown if isinstance(shown, str) else json.dumps(value))


def outcome(key: str, value: Any) -> KeyOutcome | None:
    """Return what a recipe makes of a key; None if no tool here has it."""
    to = KEYS.get(key)
    if to == "wrap.use":
        value = next((use for name, use in STRATEGIES.items() if str(value).startswith(name)), None)
    meant = {
        "adapter.use": "adapter.lora" if value else None,
        "adapter.quantize": "nf4" if value else None,
        "data.loss": "completion" if value else "all",
    }
    return KeyOutcome(outcome="translated", to={to: meant.get(to, value)}) if to else None
