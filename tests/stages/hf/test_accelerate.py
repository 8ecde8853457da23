"""Mistakes in wrap.accelerate that are found before a start, and the meaning of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.testing import plan_view
from pipeline.testing.conformance import checked
from stages.hf.accelerate import Accelerate
from stages.precision.policy import PrecisionPolicy

GPUS, BF16 = {"distributed_type": "MULTI_GPU"}, {"mixed_precision": "bf16"}
TWO = {"fsdp_version": 2}
FSDP: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": TWO}


def said(
    tmp_path: Path, content: object, *, procs: int = 2, device: str = "cuda", **policy: Any
) -> list[str]:
    """Return the problems that `check` finds with a file, by default in a recipe of fp32 on two
    GPUs."""
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content))
    stages = {"precision": PrecisionPolicy(**{"compute": "fp32", **policy})}
    plan = plan_view(stages, procs=procs, device=device)
    return [f"{p.message} ({p.hint})" for p in checked(Accelerate(config=str(file)), plan)]


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        ({**GPUS, "num_processes": 2}, {}),
        ({"distributed_type": "MULTI_CPU", "use_cpu": True}, {"device": "cpu"}),
        ({"distributed_type": "NO", "num_processes": 1}, {"procs": 1}),
        ({**GPUS, "fsdp_config": {"fsdp_activation_checkpointing": True}}, {}),
        ({**FSDP, "num_processes": -1}, {}),
        (FSDP | BF16, {"compute": "bf16", "reduce": "bf16"}),
    ],
)
def test_what_is_right(content: object, settings: dict[str, Any], tmp_path: Path) -> None:
    assert said(tmp_path, content, **settings) == []


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ({"distributed_type": "FSDP"}, {},
         "FSDP1 joins parameters into flat ones, which no checkpoint tells apart (set "
         "fsdp_version: 2 (`accelerate to-fsdp2` converts the file))"),
        ({**FSDP, "fsdp_config": {**TWO, "fsdp_activation_checkpointing": True}}, {},
         "fsdp_activation_checkpointing renames parameters in checkpoints (set it false, and "
         "activation_checkpointing: {} in the model slot)"),
        (FSDP, {"device": "cpu"},
         "accelerate shards on GPUs only; on the CPU it would replicate (use wrap.fsdp there)"),
        ({"distributed_type": "NO"}, {},
         "distributed_type NO is for one process, and there are 2 (set it to MULTI_GPU or "
         "MULTI_CPU)"),
        (GPUS | BF16, {},
         "mixed_precision computes in bf16, the precision slot in fp32 (say the same in both)"),
        (GPUS | BF16, {"compute": "bf16"},
         "accelerate replicates in bf16 by autocast, which leaves operators in fp32 (use "
         "wrap.ddp, which casts as the precision slot says)"),
        (FSDP | BF16, {"compute": "bf16"},
         "accelerate averages gradients in bf16, the precision slot in fp32 (set reduce: bf16 "
         "there)"),
        ({**GPUS, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {},
         "dynamo_config in a.json: is not translated ()"),
        ({**GPUS, "num_procesess": 2}, {},
         "num_procesess in a.json: is not translated (did you mean `num_processes`?)"),
    ],
)  # fmt: skip
def test_what_is_wrong(
    content: object, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert said(tmp_path, content, **settings) == [message]


def test_a_file_for_deepspeed_is_for_import(tmp_path: Path) -> None:
    block = {"deepspeed_config": {"zero_stag": 3}, "mixed_precision": "bf16", "num_processes": 8}
    (found,) = said(tmp_path, {"distributed_type": "DEEPSPEED", **block})
    assert found == (
        "distributed_type is DEEPSPEED: accelerate only hands the settings on to it (run "
        f"`pipe import {tmp_path}/a.json`, which makes a recipe of them)"
    )


def test_other_files(tmp_path: Path) -> None:
    (found,) = said(tmp_path, {"zero_optimization": {}})
    assert found == f"{tmp_path}/a.json is not an accelerate configuration: no distributed_type ()"
    (found,) = said(tmp_path, [])
    assert found == f"{tmp_path}/a.json: does not map keys to values ()"


def test_the_environment_is_that_of_the_launcher(tmp_path: Path) -> None:
    from stages.hf.accelerate_compat import launch_environment

    file = tmp_path / "a.json"
    block = {**TWO, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}
    file.write_text(json.dumps({"distributed_type": "FSDP", "fsdp_config": block}))
    made = launch_environment(file, 2)
    assert made["ACCELERATE_USE_FSDP"] == "true"
    assert made["FSDP_VERSION"] == "2"
    assert made["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    assert made["FSDP_OFFLOAD_PARAMS"] == "true"
    assert made["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not {"MASTER_ADDR", "MASTER_PORT", "PATH"} & {*made}
