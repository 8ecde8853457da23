"""The keys of an `accelerate config` file."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.rules import (
    Table,
    Verdict,
    WrongValueError,
    auto,
    covered,
    never,
    only,
    says,
    switched,
    unless,
)

SHARDINGS = {
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid_shard",
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "true": "full_shard",
    "false": "shard_grad_op",
}
"""What torch's ShardingStrategy is called, numbered, or in FSDP2 (`reshard_after_forward`)."""

SAVED = "checkpoints and the export are whole under every strategy"
LOADED = "every rank reads its own part of the weights, and no other"


def prefetch_units(value: Any) -> int:
    """FSDP1's flag as a number of units."""
    return 1 if rules.truth(value) else 0


_sharding = says("fsdp.sharding", rules.choice(SHARDINGS, "use FULL_SHARD or HYBRID_SHARD"))
_classes = unless(("", []), says("fsdp.classes", rules.names))
_offload = says("fsdp.cpu_offload", rules.truth)
_backward = covered("FSDP2 gathers one unit ahead in backward; numbers are the same")

FSDP: Table = {
    "version": says("fsdp.version", rules.choice({"1": 1, "2": 2}), "wrap.fsdp is always FSDP2"),
    "sharding_strategy": _sharding,
    "reshard_after_forward": _sharding,
    "offload_params": _offload,
    "cpu_offload": _offload,
    "auto_wrap_policy": says(
        "fsdp.units",
        rules.choice(
            {"transformer_based_wrap": "block", "size_based_wrap": "size", "no_wrap": "none"}
        ),
    ),
    "transformer_layer_cls_to_wrap": _classes,
    "transformer_cls_names_to_wrap": _classes,
    "min_num_params": unless((0,), says("fsdp.unit_size", rules.positive)),
    "forward_prefetch": says("fsdp.forward_prefetch", prefetch_units),
    **dict.fromkeys(("backward_prefetch", "backward_prefetch_policy"), _backward),
    "state_dict_type": covered(SAVED),
    "state_dict_config": covered(SAVED),
    "optim_state_dict_config": covered(SAVED),
    "use_orig_params": covered("FSDP2 always keeps the parameters as they are"),
    "sync_module_states": covered(LOADED),
    "cpu_ram_efficient_loading": covered(LOADED),
    "param_init_fn": never("code cannot stand in a recipe"),
    "limit_all_gathers": covered("FSDP2 limits them by itself"),
    "activation_checkpointing": switched("recompute"),
    "activation_checkpointing_offload": switched("recompute_offload"),
    "ignored_modules": never("every module is sharded"),
    "mixed_precision_policy": never(
        "dtypes have a slot of their own", "set compute and reduce in the precision slot"
    ),
    "xla": never("there is no XLA here", blocks=True),
    "xla_fsdp_v2": never("there is no XLA here", blocks=True),
    "xla_fsdp_grad_ckpt": never("there is no XLA here", blocks=True),
    "xla_fsdp_settings": never("there is no XLA here", blocks=True),
}
"""Keys without their prefix."""

FSDP_PREFIXED: Table = {**FSDP, **{f"fsdp_{key}": rule for key, rule in FSDP.items()}}
"""Both tools take them with and without it."""


STRATEGIES = {
    "no": "one",
    "multi_gpu": "wrap.ddp",
    "multi_cpu": "wrap.ddp",
    "fsdp": "wrap.fsdp",
    "deepspeed": "wrap.zero",
}
LAUNCHER = "where processes start is told to the launcher (torchrun), not to the recipe"
TPU = "only means something on TPUs"
OTHER_MACHINE = "processes run on GPUs or the CPU of this machine, or under torchrun and Slurm"
EXPORTED = "the export slot writes the model, in the dtype that it says"
DYNAMO = "nothing is compiled"


def _strategy(value: Any) -> str:
    if str(value).lower() not in STRATEGIES:
        raise WrongValueError(
            f"{value!r} is not trained on here", "use MULTI_GPU, FSDP or DEEPSPEED", blocks=True
        )
    return STRATEGIES[str(value).lower()]


def zero_stage(value: Any) -> int:
    """DeepSpeed's stage, 0 for none."""
    found = rules.whole(value)
    if found not in (0, 1, 2, 3):
        raise WrongValueError(f"must be 0, 1, 2 or 3, not {value!r}", blocks=True)
    return found


OFFLOADS = {"none": "none", "cpu": "cpu", "nvme": "nvme"}

DEEPSPEED_PLUGIN: Table = {
    "deepspeed_config_file": unless(("none",), covered("is read as a file of its own")),
    "zero_stage": says("zero.stage", zero_stage),
    "offload_optimizer_device": says("offload_optimizer.device", rules.choice(OFFLOADS)),
    "offload_param_device": says("offload_param.device", rules.choice(OFFLOADS)),
    "offload_optimizer_nvme_path": unless(("none",), says("offload_optimizer.path", rules.path)),
    "offload_param_nvme_path": unless(("none",), says("offload_param.path", rules.path)),
    "gradient_accumulation_steps": auto("accumulation", 1, rules.positive),
    "gradient_clipping": auto("max_grad_norm", 1.0, rules.number),
    "zero3_init_flag": covered("stage 3 cuts parameters as they are made, always"),
    "zero3_save_16bit_model": covered(EXPORTED),
    "deepspeed_hostfile": covered(LAUNCHER),
    "deepspeed_exclusion_filter": covered(LAUNCHER),
    "deepspeed_inclusion_filter": covered(LAUNCHER),
    "deepspeed_multinode_launcher": covered(LAUNCHER),
    "deepspeed_moe_layer_cls_names": unless(
        ("",), says("zero.extra.leaf_module", lambda value: {"classes": rules.names(value)})
    ),
}

_one = only(
    1,
    why="is 1",
    otherwise="a model is cut over data-parallel ranks only",
    hint="set it to 1, or train with a tool that has it",
    blocks=True,
)
_beside = covered("belongs to a parallelism that is not used")
PARALLELISM: Table = {
    f"parallelism_config_{key}": rule
    for key, rule in {
        "dp_replicate_size": says("parallel.replicate", rules.positive),
        "dp_shard_size": says("parallel.shard", rules.positive),
        "tp_size": _one,
        "cp_size": _one,
        "sp_size": _one,
        "cp_backend": _beside,
        "cp_comm_strategy": _beside,
        "sp_backend": _beside,
        "sp_seq_length": _beside,
        "sp_seq_length_is_variable": _beside,
        "sp_attn_implementation": _beside,
    }.items()
}

DYNAMO_BLOCK: Table = {
    "dynamo_backend": only("no", why=DYNAMO, otherwise=DYNAMO, hint="leave dynamo_config out"),
    "dynamo_mode": covered(DYNAMO),
    "dynamo_use_fullgraph": covered(DYNAMO),
    "dynamo_use_dynamic": covered(DYNAMO),
    "dynamo_use_regional_compilation": covered(DYNAMO),
}
DYNAMO_BOTH: Table = {
    **DYNAMO_BLOCK,
    **{key.removeprefix("dynamo_"): rule for key, rule in DYNAMO_BLOCK.items()},
}


def _processes(value: Any) -> Verdict:
    if value == -1:
        return Verdict(outcome="default", why="told at the start")
    return says("procs", rules.positive)(value)


def device(use_cpu: Any) -> str:
    """The device that a flag for the CPU asks for."""
    return "cpu" if rules.truth(use_cpu) else "auto"


PRECISIONS = {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""`false` is what YAML 1.1 makes of an unquoted no."""
FP8 = "set model.fp8 in the recipe"

ACCELERATE: Table = {
    "compute_environment": only(
        "local_machine", why="is so", otherwise=OTHER_MACHINE,
        hint="use LOCAL_MACHINE", blocks=True,
    ),
    "distributed_type": says("distributed", _strategy),
    "mixed_precision": says(
        "compute",
        rules.choice(PRECISIONS, f"write bf16; products in fp8: {FP8}", blocks=True),
    ),
    "fp16": says("compute", lambda value: "fp16" if rules.truth(value) else "fp32"),
    "use_cpu": says("device", device),
    "debug": only(False, why="is off", otherwise="collectives are not traced", hint="set it false"),
    "num_processes": _processes,
    "machine_rank": covered(LAUNCHER),
    "num_machines": covered(f"{LAUNCHER}; launch.procs counts over all machines"),
    "gpu_ids": only(
        "all", why="all GPUs are used", otherwise="the recipe does not choose GPUs",
        hint="set CUDA_VISIBLE_DEVICES",
    ),
    "main_process_ip": covered(LAUNCHER),
    "main_process_port": covered(LAUNCHER),
    "rdzv_backend": covered(LAUNCHER),
    "same_network": covered(LAUNCHER),
    "main_training_function": covered("there is no script of yours"),
    "enable_cpu_affinity": only(
        False, why="is off", otherwise="processes are not bound to cores", hint="use numactl"
    ),
    "fp8_config": never("products in fp8 are the model slot's to say", FP8),
    "deepspeed_config": DEEPSPEED_PLUGIN,
    "fsdp_config": FSDP_PREFIXED,
    "parallelism_config": PARALLELISM,
    "megatron_lm_config": never("there is no Megatron-LM here", "leave it out", blocks=True),
    "mpirun_config": never("mpirun does not start processes here", "start with torchrun"),
    "downcast_bf16": covered(TPU),
    "tpu_name": covered(TPU),
    "tpu_zone": covered(TPU),
    "tpu_use_cluster": covered(TPU),
    "tpu_use_sudo": covered(TPU),
    "command_file": covered(TPU),
    "commands": covered(TPU),
    "tpu_vm": covered(TPU),
    "tpu_env": covered(TPU),
    "dynamo_config": DYNAMO_BOTH,
    "dynamo_backend": DYNAMO_BLOCK["dynamo_backend"],
}  # fmt: skip

_sagemaker = never(OTHER_MACHINE, "use LOCAL_MACHINE", blocks=True)
SAGEMAKER: Table = dict.fromkeys(
    (
        *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region"),
        *("base_job_name", "pytorch_version", "transformers_version", "py_version"),
        *("sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
    ),
    _sagemaker,
)
"""Keys that only files for SageMaker have."""

ACCELERATE_ALL: Table = {**ACCELERATE, **SAGEMAKER}
