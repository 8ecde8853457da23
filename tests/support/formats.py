"""Checkpoints of other tools, saved and loaded by real engines on every rank; sources' digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pipeline.checkpoint.formats import StateSource
from pipeline.contracts.engine import LossScale
from pipeline.distributed.process_group import DistContext
from tests.support.runs import context
from tests.support.state import Setting, digest, make_engine, train

STEP = "step-00000003"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def same(told: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an engine's digest that foreign formats keep too."""
    return {key: value for key, value in told.items() if key != "groups"}


def digest_of(source: StateSource) -> dict[str, str]:
    """Return the digest of a source, comparable with `same`."""
    found = {}
    for key, entry in source.tensors.items():
        if not key.startswith("random/"):
            hashed = hashlib.sha256()
            for _, data in source.read(key, 0, entry.numel):
                hashed.update(data)
            found[key] = hashed.hexdigest()
    scale = source.state.loss_scale
    return found | {
        "updates": str(sorted(source.state.updates.items())),
        "frozen": str(sorted(source.state.frozen)),
        "aliases": str(dict(source.state.aliases)),
        "loss_scale": str(scale and LossScale(scale=scale.scale, good_steps=scale.good_steps)),
    }


def save_deepspeed(
    dist: DistContext, folder: str, settings: dict[str, Setting]
) -> dict[str, dict[str, str]]:
    """Train one engine after another and save with DeepSpeed's own `save_checkpoint`; return the
    live states. On three ranks the model has a buffer."""
    found = {}
    for name, setting in settings.items():
        Path(folder, name).mkdir(exist_ok=True)
        ctx = context(dist, Path(folder, name))
        engine: Any = make_engine(ctx, setting)
        if dist.world_size == 3:
            engine.deepspeed.module.register_buffer("counts", torch.arange(5))
        train(engine, 0, 3)
        engine.deepspeed.save_checkpoint(f"{folder}/{name}/{STEP}", tag="state")
        found[name] = digest(engine, dist)
        engine.close()
    return found


def load_universal(dist: DistContext, folder: str, wraps: list[str]) -> list[dict[str, Any]]:
    """Load a universal checkpoint into one engine after another by DeepSpeed's own
    `load_checkpoint`; return the state, the groups' weight decays, and the next step's result."""
    found = []
    for wrap in wraps:
        Path(folder, wrap).mkdir(exist_ok=True)
        engine: Any = make_engine(context(dist, Path(folder, wrap)), Setting(wrap=wrap))
        engine.deepspeed._config.load_universal_checkpoint = True
        path, _ = engine.deepspeed.load_checkpoint(f"{folder}/universal")
        assert path is not None
        told = digest(engine, dist)
        decays = [group["weight_decay"] for group in engine.deepspeed.optimizer.param_groups]
        found.append({"state": told, "decays": decays, "next": _next_step(engine)})
        engine.close()
    return found


def _next_step(engine: Any) -> str:
    try:
        train(engine, 3, 4)
    except RuntimeError as error:
        return str(error)
    return "goes on"


def save_dcp(dist: DistContext, folder: str, setting: Setting) -> dict[str, str]:
    """Train, and save as torchtitan does (`flat`) and as accelerate does (`nested`)."""
    engine: Any = make_engine(context(dist, folder), setting)
    train(engine, 0, 3)
    told = digest(engine, dist)
    model = get_model_state_dict(engine.parts[0])
    flat = get_optimizer_state_dict(engine.parts[0], engine.optimizers[0].optimizer, options=FLAT)
    nested = get_optimizer_state_dict(engine.parts[0], engine.optimizers[0].optimizer)
    dcp.save({"model": model, "optimizer": flat}, checkpoint_id=f"{folder}/flat")
    dcp.save({**model, "optimizer": flat}, checkpoint_id=f"{folder}/root")
    dcp.save({"model": model}, checkpoint_id=f"{folder}/nested/pytorch_model_fsdp_0")
    dcp.save({"optimizer": nested}, checkpoint_id=f"{folder}/nested/optimizer_0")
    mesh = init_device_mesh("cpu", (dist.world_size,))
    columns = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(1)])
    dcp.save({"model": {"w": columns}}, checkpoint_id=f"{folder}/columns")
    engine.close()
    return told


def load_dcp(dist: DistContext, folder: str, wraps: list[str]) -> list[dict[str, str]]:
    """Load into fresh engines by `torch.distributed.checkpoint.load`."""
    found = []
    for wrap in wraps:
        Path(folder, wrap).mkdir(exist_ok=True)
        engine: Any = make_engine(context(dist, Path(folder, wrap)), Setting(wrap=wrap))
        # torch takes an optimizer whose parameters have gradients for one with state.
        engine.parts[0].zero_grad(set_to_none=True)
        own = {
            "model": get_model_state_dict(engine.parts[0]),
            "optimizer": get_optimizer_state_dict(
                engine.parts[0], engine.optimizers[0].optimizer, options=FLAT
            ),
        }
        dcp.load(own, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(engine.parts[0], own["model"])
        set_optimizer_state_dict(
            engine.parts[0], engine.optimizers[0].optimizer, own["optimizer"], options=FLAT
        )
        found.append(digest(engine, dist))
        engine.close()
    return found


def tiny_native(folder: Path) -> None:
    """Write a checkpoint of ZeRO-3 on one rank, as far as it is read before the last file."""
    torch.save({"module": {}}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    torch.save({"loss_scaler": None}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def tiny_universal(folder: Path) -> None:
    """Write a universal checkpoint of one parameter, after three steps."""
    own = folder / "zero" / "w"
    own.mkdir(parents=True)
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"param": torch.ones(4)}, own / f"{kind}.pt")
    torch.save(torch.tensor(3.0), own / "step.pt")
    group = {"lr": 1e-3, "params": [0]}
    optimizer = {"state": {0: {"step": 3}}, "param_groups": [group]}
    torch.save(
        {"param_groups": [group], "optimizer_state_dict": optimizer},
        folder / "zero" / "optimizer_state.pt",
    )
    model = {
        "param_shapes": [{"w": torch.Size([4])}], "frozen_param_shapes": {}, "buffer_names": [],
        "shared_params": {}, "global_steps": 3, "dp_world_size": 1,
    }  # fmt: skip
    torch.save(model, folder / "mp_rank_00_model_states.pt")
