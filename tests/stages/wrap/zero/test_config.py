"""The DeepSpeed configuration that a recipe gives, and the mistakes found before a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from pipeline import ModelSource, StageError, UpdateRule
from pipeline.contracts.optimizer import LossScaling, Precision
from pipeline.testing import context, plan_view
from pipeline.testing.conformance import checked
from stages.optimizer import Lion
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.wrap.axes import ContextParallel, TensorParallel
from stages.wrap.zero import Aio, OptimizerOffload, ParameterOffload, PlusPlus, Zero
from stages.wrap.zero.config import KNOWN, beyond_bucket, generate

CPU, NVME = OptimizerOffload(), OptimizerOffload(device="nvme", path="/scratch")
WHOLE = {"master": "fp32", "compute": "fp32", "reduce": "fp32", "buffer": None}


def config(stage: Zero, **overrides: Any) -> dict[str, Any]:
    precision: dict[str, Any] = {**WHOLE, "loss_scaling": None, **overrides}
    return generate(stage, Precision(**precision), max_grad_norm=1.0)


def found(stage: Zero, *, device: str = "cuda", precision: Any = None) -> dict[str, str]:
    """Return the problems by key, as shown."""
    slots = {"precision": precision or PrecisionPolicy(), "wrap": stage}
    plan = plan_view(slots, procs=2, device=device)
    return {problem.key: str(problem) for problem in stage.check(plan)}


def test_defaults_leave_batches_to_the_loop_and_dtypes_to_the_policy() -> None:
    made = config(Zero())
    assert made["gradient_accumulation_steps"] == 1
    assert made["managed_gradient_accumulation"] is False
    assert made["gradient_clipping"] == 1.0
    assert made["communication_data_type"] == "fp32"
    assert made["zero_optimization"]["stage"] == 2
    assert made["zero_optimization"]["compute_grad_norm"] is True
    assert not made.keys() & {"bf16", "fp16", "aio", "optimizer", "scheduler"}


def test_precision_blocks() -> None:
    assert config(Zero(), compute="bf16")["bf16"] == {"enabled": True}
    scaling = LossScaling(initial_scale=2.0**12, growth_interval=500)
    fp16 = config(Zero(), compute="fp16", loss_scaling=scaling)["fp16"]
    assert fp16["enabled"] is True
    assert fp16["initial_scale_power"] == 12
    assert (fp16["loss_scale"], fp16["hysteresis"], fp16["min_loss_scale"]) == (0, 1, 1)
    assert config(Zero(), reduce="bf16")["communication_data_type"] == "bf16"


def test_stage_3_offloaded_to_disk() -> None:
    made = config(Zero(
        stage=3, offload_optimizer=NVME, aio=Aio(queue_depth=32), sub_group_size=7,
        offload_param=ParameterOffload(device="nvme", path="/scratch", buffer_count=6),
        prefetch_bucket_size=0, param_persistence_threshold=9,
    ))  # fmt: skip
    zero = made["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 0
    assert zero["stage3_param_persistence_threshold"] == 9
    assert zero["sub_group_size"] == 7
    assert zero["offload_optimizer"]["nvme_path"] == "/scratch"
    assert zero["offload_param"]["buffer_count"] == 6
    assert zero["overlap_comm"] is True
    assert made["aio"]["queue_depth"] == 32
    assert "allgather_bucket_size" not in zero
    assert made.keys() <= KNOWN
    assert config(Zero(round_robin_gradients=True), compute="bf16").keys() <= KNOWN


def test_extra_is_merged_into_blocks() -> None:
    extra = {"zero_optimization": {"memory_efficient_linear": False}, "dump_state": True}
    made = config(Zero(extra=extra))
    assert made["zero_optimization"]["memory_efficient_linear"] is False
    assert made["zero_optimization"]["stage"] == 2
    assert made["dump_state"] is True
    assert found(Zero(extra=extra)) == {}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("zero_optimization.zenflow", {}, "it replaces the optimizer step"),
        ("gradient_clipping", 1, "is set by the optimizer slot"),
        ("bf16", {"enabled": True}, "is set by the precision slot"),
        ("train_batch_size", 8, "is set by the train stage"),
        ("dumpstate", True, "did you mean dump_state?"),
        ("dump_state", "auto", "ignores the value auto"),
        ("zero_optimization", 3, "is not a mapping"),
        ("zero_optimization.stage3_prefetch_bucket_size", 1, "is set by a field of this stage"),
        ("zero_optimization.offload_optimizer", {"nvme_path": "/a"}, "by a field of this stage"),
        ("zero_optimization.zero_hpz_partition_size", 2, "is set by a field of this stage"),
        ("tensor_parallel", {"autotp_size": 2}, "is set by the field tensor_parallel"),
        ("sequence_parallel_size", 2, "is set by the field context_parallel"),
        ("pipeline", {}, "wrap.fsdp divides blocks and experts"),
    ],
)
def test_extra_keys_that_are_refused(key: str, value: Any, said: str) -> None:
    block, _, nested = key.partition(".")
    problems = found(Zero(extra={block: {nested: value} if nested else value}))
    assert list(problems) == [f"extra.{key}"]
    assert said in problems[f"extra.{key}"]


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (Zero(offload_param=ParameterOffload(), offload_optimizer=CPU), {"offload_param"}),
        (Zero(stage=1, prefetch_bucket_size=5, sub_group_size=9),
         {"prefetch_bucket_size", "sub_group_size"}),
        (Zero(stage=1, overlap_comm=True), {"overlap_comm"}),
        (Zero(offload_optimizer=NVME), {"offload_optimizer.device"}),
        (Zero(stage=3, offload_optimizer=OptimizerOffload(device="nvme")),
         {"offload_optimizer.path"}),
        (Zero(stage=3, offload_optimizer=OptimizerOffload(path="/a")), {"offload_optimizer.path"}),
        (Zero(stage=3, offload_optimizer=NVME), set()),
        (Zero(), set()),
    ],
)  # fmt: skip
def test_combinations_that_make_no_sense(stage: Zero, keys: set[str]) -> None:
    assert found(stage).keys() == keys


ALL = PlusPlus(secondary_partition=2, quantized_weights=True, quantized_gradients=True)
NARROW = PrecisionPolicy(compute="bf16", reduce="fp16")


def test_less_traffic_between_nodes() -> None:
    zero = config(Zero(stage=3, plus_plus=ALL), compute="bf16", reduce="fp16")["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 2
    assert zero["zero_quantized_weights"] is zero["zero_quantized_gradients"] is True
    assert found(Zero(stage=3, plus_plus=ALL), precision=NARROW) == {}
    plain = config(Zero(stage=3, plus_plus=PlusPlus()))["zero_optimization"]
    assert not any(key.startswith("zero_") for key in plain)


@pytest.mark.parametrize(
    ("fields", "device", "precision", "said"),
    [
        ({"stage": 2}, "cuda", NARROW, {"": "needs stage 3"}),
        ({"plus_plus": PlusPlus(secondary_partition=3)}, "cuda", NARROW,
         {".secondary_partition": "2 processes do not divide into groups of 3"}),
        ({"plus_plus": PlusPlus(secondary_partition=2),
          "offload_param": ParameterOffload(device="nvme", path="/a")}, "cuda", NARROW,
         {".secondary_partition": "no second copy on a disk"}),
        ({"tensor_parallel": TensorParallel(size=2)}, "cuda", NARROW,
         {"": "builds the groups of ZeRO++ from all ranks"}),
        ({"context_parallel": ContextParallel(size=2)}, "cuda", NARROW, {}),
        ({}, "cpu", NARROW,
         {".quantized_weights": "on GPUs only", ".quantized_gradients": "on GPUs only"}),
        ({}, "cuda", PrecisionPolicy(compute="fp32"),
         {".quantized_weights": "rounded to fp16",
          ".quantized_gradients": "gradients in fp32 for fp16 ones"}),
        ({}, "cuda", PrecisionPolicy(compute="bf16", reduce="bf16"),
         {".quantized_gradients": "gradients in bf16 for fp16 ones"}),
    ],
)  # fmt: skip
def test_less_traffic_where_deepspeed_cannot(
    fields: dict[str, Any], device: str, precision: Any, said: dict[str, str]
) -> None:
    stage = Zero(**{"stage": 3, "plus_plus": ALL, **fields})
    problems = found(stage, device=device, precision=precision)
    assert problems.keys() == {f"plus_plus{key}" for key in said}
    assert all(text in problems[f"plus_plus{key}"] for key, text in said.items())


def test_narrow_masters_are_refused_where_deepspeed_cannot() -> None:
    narrow = PrecisionPolicy(compute="bf16", master="bf16")
    assert "stage 1 keeps fp32" in found(Zero(stage=1), precision=narrow)["stage"]
    by_torch = Zero(offload_optimizer=CPU, optimizer_implementation="torch")
    assert "CPU Adam" in found(by_torch, precision=narrow)["optimizer_implementation"]
    for stage in (Zero(stage=2), Zero(stage=3), Zero(offload_optimizer=CPU)):
        assert found(stage, precision=narrow) == {}
        made = config(stage, master="bf16", compute="bf16")["bf16"]
        assert made["bf16_master_weights_and_grads"] is True
        assert made["bf16_optimizer_states"] is (stage.offload_optimizer is None)


def ruled(*rules: UpdateRule) -> Any:
    """Return an optimizer of other rules."""
    return type("Ruled", (Lion,), {"update_rules": lambda self: list(rules)})()


BOTH = ruled(UpdateRule("lion"), UpdateRule("adamw"))
MATRICES = ruled(UpdateRule("polar", elementwise=False))
EIGHT, ROUNDED = AdamW(moments="8bit"), AdamW(stochastic_rounding=True)
ON_CPU, ON_DISK = Zero(offload_optimizer=CPU), Zero(stage=3, offload_optimizer=NVME)


@pytest.mark.parametrize(
    ("stage", "optimizer", "master", "problem"),
    [
        (
            ON_DISK, EIGHT, "fp32",
            "offload_optimizer.device: nvme needs DeepSpeed's CPU Adam, which computes adamw; the "
            "optimizer slot asks for adamw_8bit (set device: cpu)",
        ),
        (
            ON_CPU, ROUNDED, "bf16",
            "offload_optimizer: offloaded bf16 master weights need DeepSpeed's CPU Adam, which "
            "computes adamw; the optimizer slot asks for adamw_stochastic (leave it out or set "
            "master: fp32 in the precision slot)",
        ),
        (ON_CPU, EIGHT, "fp32", ""),
        (Zero(), Lion(), "bf16", ""),
        (
            Zero(), BOTH, "fp32",
            "stage: DeepSpeed takes one optimizer, the optimizer slot asks for lion, adamw (use "
            "wrap.fsdp, or another optimizer)",
        ),
        (
            ON_DISK, MATRICES, "fp32",
            "stage: the optimizer slot's rule polar needs whole matrices, and DeepSpeed divides "
            "all parameters together, as one flat tensor (use wrap.fsdp, or another optimizer)",
        ),
    ],
)  # fmt: skip
def test_rules_that_only_torch_computes_are_refused_where_deepspeed_must(
    stage: Zero, optimizer: Any, master: Any, problem: str
) -> None:
    slots = {"precision": PrecisionPolicy(compute="bf16", master=master), "optimizer": optimizer}
    assert [str(one) for one in checked(stage, plan_view(slots))] == [problem] * bool(problem)


def test_a_rule_that_no_field_tells_is_refused_at_the_start(tmp_path: Path) -> None:
    """An optimizer stage of another package may have no `update_rules` for `pipe check`."""
    stage, ctx = Zero(stage=3, offload_optimizer=NVME), context(tmp_path)
    precision = Precision(**WHOLE, loss_scaling=None)
    with pytest.raises(StageError, match=r"nvme needs DeepSpeed's CPU Adam, .* asks for lion"):
        stage.run(ctx, cast("ModelSource", None), precision, Lion().run(ctx))


def test_gradients_that_overlapped_reductions_may_lose() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 4))
    overlapped = Zero(overlap_comm=True, reduce_bucket_size=199)
    warning = beyond_bucket(overlapped, model)
    assert "the gradient of 0.weight is larger" in warning
    assert warning.endswith("set reduce_bucket_size: 200")
    assert not beyond_bucket(Zero(reduce_bucket_size=199), model)
    assert not beyond_bucket(Zero(overlap_comm=True, reduce_bucket_size=200), model)
    model[0].weight.requires_grad = False
    assert not beyond_bucket(overlapped, model)


def test_checking_imports_neither_torch_nor_deepspeed() -> None:
    program = (
        "import sys\n"
        "from pipeline.testing import plan_view\n"
        "from stages.wrap.zero import Zero\n"
        "stage = Zero(extra={'dumpstate': 1})\n"
        "plan = plan_view({'wrap': stage})\n"
        "assert [p.key for p in stage.check(plan)] == ['extra.dumpstate']\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
