"""Names of DeepSpeed that this project relies on: private ones through which the training state is
read, and keys of its configuration. A change must not go unnoticed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from stages.wrap.zero.config import KNOWN, REFUSED, ZERO

PRIVATE: dict[Any, list[str]] = {
    DeepSpeedZeroOptimizer: [
        "def update_lp_params(self)", "self.single_partition_of_fp32_groups",
        "self.round_robin_bit16_groups", "self.round_robin_bit16_padding",
        "self.dp_process_group", "self.optimizer.step()",
        "self._global_grad_norm = scaled_global_grad_norm / prev_scale",
    ],
    BF16_Optimizer: [
        "def update_lp_params(self)", "self.bf16_groups", "self.fp32_groups_flat_partition",
        "self.optimizer.step()", "self._global_grad_norm = all_groups_norm",
    ],
    DeepSpeedZeroOptimizer_Stage3: [
        "def get_param_id(self, param)", "def _get_param_partition_rank(self, param)",
        "def _swappable_optimizer_subgroup(self, sub_group_id)",
        "def _optimizer_states_and_gradient_swap_in(self, sub_group_id, timer_names=None)",
        "def _optimizer_states_and_gradient_swap_out(self, sub_group_id, timer_names=None)",
        "def _release_swap_buffers(self, sub_group_id)",
        "def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id)",
        "self.fp16_groups", "self.fp32_partitioned_groups_flat",
        "self.fp16_partitioned_groups_flat_numel", "self.sub_group_to_group_id",
        "self.grad_position[param_id] = [int(i), int(current_offset), int(num_elements)]",
        "self.persistent_parameters", "optimizer.step()",
        "self._global_grad_norm = scaled_global_grad_norm / self.loss_scale",
    ],
    Init: ["def _convert_to_zero_parameters(self, param_list)"],
    Init.__base__: ["def _enable_mem_efficient_linear(self)"],
    DynamicLossScaler: [
        "self.cur_scale", "self.min_scale", "self.cur_iter", "self.last_overflow_iter",
    ],
    DeepSpeedCPUAdam: [
        "self.fp32_optimizer_states", "self.ds_opt_adam", "self.opt_id", "state['step'] = 0",
        "state['exp_avg'] = torch.zeros_like", "state['exp_avg_sq'] = torch.zeros_like",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", PRIVATE, ids=lambda kind: kind.__name__)
def test_private_names_are_still_there(kind: Any) -> None:
    source = inspect.getsource(kind)
    assert [name for name in PRIVATE[kind] if name not in source] == []


class Recorded(dict[str, Any]):
    """A configuration that records the keys that are read."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.asked: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(str(key))
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def test_top_level_keys_are_those_that_deepspeed_reads() -> None:
    config = Recorded(train_micro_batch_size_per_gpu=1)
    DeepSpeedConfig(config)
    assert {"steps_per_print", "zero_optimization", "fp16"} <= config.asked
    obsolete = {*_REMOVED_TOP_LEVEL_CONFIG_KEYS, "vocabulary_size"}  # it only warns of that key
    elsewhere = {"sequence_parallel_size"}
    assert (config.asked - obsolete) | elsewhere == KNOWN


def test_refused_keys_of_zero_are_those_of_its_model() -> None:
    """The model itself refuses unknown keys."""
    fields = DeepSpeedZeroConfig.model_fields.items()
    known = {key for name, field in fields for key in (name, field.alias or name)}
    assert {key.partition(".")[2] for key in REFUSED if key.startswith(f"{ZERO}.")} <= known
    assert DeepSpeedZeroConfig.model_config["extra"] == "forbid"


def test_deepspeed_has_no_quantizing_kernels_for_the_cpu() -> None:
    from deepspeed.ops.op_builder import cpu

    with pytest.raises(ValueError, match="not been implemented on CPU"):
        getattr(cpu, "QuantizerBuilder", cpu.NotImplementedBuilder)().load()
