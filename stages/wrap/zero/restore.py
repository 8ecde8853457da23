"""What DeepSpeed 0.19's `load_checkpoint` leaves out and exact continuation needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from stages.formats.deepspeed_files import load
from stages.wrap.zero import compat


def restore_bias_correction(engine: Any) -> None:
    """Put the powers of beta that DeepSpeedCPUAdam keeps where they were when saving.

    It keeps beta^t as a running float32 product outside of its saved state and would go on with
    pow(beta, t), which differs in the last bits; so the product is computed again.
    """
    optimizer = engine.optimizer.optimizer
    kernel = getattr(optimizer, "ds_opt_adam", None)
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    if kernel is None or not steps:
        return
    group = optimizer.param_groups[0]
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(1, int(max(steps)) + 1):
        kernel.adam_update(
            optimizer.opt_id, step, group["lr"], *group["betas"], group["eps"], 0.0, True, *nothing
        )


def restore_swapped_state(engine: Any, folder: Path) -> None:
    """With NVMe offload: restore moments, step counts and sub-groups too small to be swapped.

    `load_checkpoint` copies the swap files back but registers only the master weights in them.
    """
    zero = engine.optimizer
    if not compat.swaps_masters(zero):
        return
    rank = torch.distributed.get_rank(zero.dp_process_group)
    prefix = "bf16_" if engine.bfloat16_enabled() else ""
    file = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    saved = load(file, verify=False)["optimizer_state_dict"]
    vars(zero.loss_scaler).update(vars(saved["loss_scaler"]))
    states = saved["optimizer_state_dict"]["state"]
    zero.checkpoint_event_prologue()
    with torch.no_grad():
        for index, flat in enumerate(saved["fp32_flat_groups"]):
            _restore_sub_group(zero, index, flat, states.get(index, {}))
    zero.checkpoint_event_epilogue()


def _restore_sub_group(zero: Any, index: int, flat: Tensor, saved: Mapping[str, Any]) -> None:
    master = zero.fp32_partitioned_groups_flat[index]
    length = zero.fp16_partitioned_groups_flat_numel[index]
    swapped = zero._swappable_optimizer_subgroup(index)
    if saved:
        zero.optimizer.state[master] = {
            name: _placed(value, length, swapped=swapped) for name, value in saved.items()
        }
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(index)
    else:
        master.data.copy_(flat)
    zero._reassign_or_swap_out_partitioned_parameters(index)
    if swapped:
        zero._optimizer_states_and_gradient_swap_out(index)


def _placed(value: Any, length: int, *, swapped: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    # A swapped moment was saved empty: an empty shell of its size is filled by the swap-in.
    return (
        torch.empty(length, dtype=value.dtype) if swapped and not value.numel() else value.clone()
    )
