"""Write a state as a universal checkpoint of DeepSpeed 0.19, one tensor in memory at a time."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.formats import StateSource
from pipeline.checkpoint.offline_writer import appearing
from pipeline.contracts.engine import WEIGHT, LossScale
from pipeline.errors import CheckpointError
from stages.formats.deepspeed_universal import FP32
from stages.formats.files import save
from stages.formats.mapped import MOMENTS, assembled, require_file_name

MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Where stages 1 and 2, and stage 3, look for what is no tensor."""


def write_universal(source: StateSource, folder: Path) -> Sequence[str]:
    """Write `folder`; returns what to know before loading it. Raises CheckpointError for a state
    that DeepSpeed cannot hold."""
    updates = _one_count(source)
    tag = f"global_step{source.step}"
    with appearing(folder) as partial:
        state = partial / tag
        zero = state / "zero"
        zero.mkdir(parents=True)
        for key in source.tensors:
            kind, _, name = key.partition("/")
            if kind in (WEIGHT, *MOMENTS):
                own = zero / require_file_name(name, source.where)
                own.mkdir(exist_ok=True)
                file = FP32 if kind == WEIGHT else kind
                save({"param": assembled(source, key)}, own / f"{file}.pt")
        for name in source.state.updates:
            # A tensor, which torch's optimizers need and DeepSpeed's take.
            save(torch.tensor(float(updates)), zero / name / "step.pt")
        save(_optimizer_state(source, updates), zero / "optimizer_state.pt")
        for file in MODEL_STATES:
            save(_model_state(source), state / file)
        (partial / "latest_universal").write_text(tag, encoding="utf-8")
    return list(_notes(source))


def _one_count(source: StateSource) -> int:
    state = source.state
    if set(state.moments) != set(MOMENTS):
        raise CheckpointError(
            f"{source.where}: DeepSpeed's universal checkpoint holds weights with Adam's moments; "
            f"here is {', '.join(state.moments) or 'no optimizer state'}"
        )
    counts = set(state.updates.values())
    if len(counts) != 1:
        raise CheckpointError(
            f"{source.where}: DeepSpeed counts updates once for all parameters; here they were "
            f"updated {', '.join(map(str, sorted(counts)))} times"
        )
    return counts.pop()


def _optimizer_state(source: StateSource, updates: int) -> dict[str, Any]:
    groups = [
        {**group.settings, "step": updates, "params": [number]}
        for number, group in enumerate(source.state.groups)
    ]
    found: dict[str, Any] = {
        "param_groups": groups,
        # Stage 3 gives this very object to all sub-groups. A tensor would be counted up by each of
        # them at every step; with a number, optimizers that need a tensor refuse to go on.
        "optimizer_state_dict": {"state": {0: {"step": updates}}, "param_groups": groups},
        "ds_version": _version(),
    }
    if source.state.loss_scale is not None:
        found |= {"loss_scaler": _scaler(source.state.loss_scale), "dynamic_loss_scale": True}
    return found


def _scaler(scale: LossScale) -> Any:
    from pipeline.distributed.process_group import DistContext
    from stages.wrap.zero.compat import point_at_device

    point_at_device(DistContext(device=torch.device("cpu")))
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=scale.scale, scale_window=1000, min_scale=1, delayed_shift=2,
        consecutive_hysteresis=False,
    )  # fmt: skip
    scaler.cur_iter = scaler.last_overflow_iter + 1 + scale.good_steps
    return scaler


def _model_state(source: StateSource) -> dict[str, Any]:
    state = source.state
    shapes = {
        key.removeprefix(f"{WEIGHT}/"): torch.Size(entry.shape)
        for key, entry in source.tensors.items()
        if key.startswith(f"{WEIGHT}/")
    }
    groups = [{name: shapes[name] for name in group.parameters} for group in state.groups]
    return {
        "module": {},
        "buffer_names": [
            name for name in shapes if name not in state.updates and name not in state.frozen
        ],
        "param_shapes": groups,
        "frozen_param_shapes": {name: shapes[name] for name in state.frozen},
        "frozen_param_fragments": None,
        "shared_params": dict(state.aliases),
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "global_steps": source.step,
        "global_samples": source.progress.get("samples", 0),
        "skipped_steps": source.progress.get("skipped", 0),
        "dp_world_size": source.world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _version(),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        "progress": dict(source.progress),
    }


def _version() -> str:
    return importlib.metadata.version("deepspeed")


def _notes(source: StateSource) -> Iterator[str]:
    state = source.state
    yield (
        "load it in DeepSpeed with `checkpoint: {load_universal: true}` and "
        "load_lr_scheduler_states=False; the schedule is not part of the state"
    )
    yield (
        "DeepSpeed's zero_to_fp32 reads no universal checkpoint: `pipe export` of what was "
        "converted writes the weights"
    )
    yield (
        "ZeRO-3: DeepSpeed 0.19 continues a universal checkpoint with its own optimizers; those of "
        "torch stop at the next step"
    )
    if len({str(sorted(group.settings.items())) for group in state.groups}) > 1:
        yield (
            "ZeRO-3: DeepSpeed 0.19 gives every optimizer group the hyperparameters of the first, "
            "weight decay too: set them again after loading"
        )
    if state.frozen or len(source.state.updates) < sum(
        key.startswith(f"{WEIGHT}/") for key in source.tensors
    ):
        yield (
            "DeepSpeed loads only trained parameters from a universal checkpoint: load frozen "
            "parameters and buffers with the model"
        )
    if state.averages:
        yield f"left out, as there is no place for it: {', '.join(state.averages)} of the weights"
    if state.loss_scale is not None:
        yield "loss scaling will have DeepSpeed's default window, hysteresis and least scale"
