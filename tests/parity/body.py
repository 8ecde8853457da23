"""Trainings of the built-in stages on toy samples, and the ranks that run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from stages.adapter.lora import Lora
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.consolidate.stream import ConsolidateStream
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from tests.support.multimodal import saved, whole_source
from tests.support.runs import TINY, context, packed_data, toy_data
from tests.support.strategies import Strategy

SEED, STEPS, BATCH = 7, 6, 8
LR, WARMUP, DECAY, CLIP = 1e-3, 2, 0.1, 0.5
ADAMW = AdamW(lr=LR, weight_decay=DECAY, warmup_steps=WARMUP, max_grad_norm=CLIP)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, as plain data that travels to the ranks: fields of the slots in recipes."""

    ranks: int = 2
    wrap: str = "wrap.fsdp"
    fields: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    """Config of the model, or what differs from TINY."""
    hf: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of model.hf."""
    saved: str = ""
    """Type of a saved model of text and images, instead of `model`."""
    towers: bool = False
    """Keep its vision tower in the module."""
    lora: Mapping[str, Any] | None = None
    loop: Mapping[str, Any] = field(default_factory=lambda: {"micro_batch_size": 2})
    packed: bool = False
    compute: Any = "fp32"
    master: Any = "fp32"
    optimizer: Any = ADAMW

    @property
    def data(self) -> Any:
        return packed_data() if self.packed else toy_data()


def tiny_source(ctx: Any, lora: Any = None, fields: Any = None, **overrides: Any) -> Any:
    """Return the tiny random model of the parity tests, or one of another architecture; `fields`
    are further fields of model.hf."""
    config = overrides if "model_type" in overrides else {**TINY, **overrides}
    source = HfModel(config=config, init="random", **(fields or {})).run(ctx)
    return source if lora is None else Lora(**lora).run(ctx, source)


def source_of(ctx: Any, case: Case) -> Any:
    if not case.saved:
        return tiny_source(ctx, case.lora, case.hf, **case.model)
    fields = {**case.hf, "path": str(ctx.run_dir / "model")}
    if ctx.dist.is_main:
        saved(case.saved, ctx.run_dir / "model")
    ctx.dist.barrier()
    return whole_source(ctx, **fields) if case.towers else HfModel(**fields).run(ctx)


def wrap_fields(given: dict[str, Any], folder: str, dist: DistContext) -> dict[str, Any]:
    """Return the fields of the wrap slot. `accelerate` is the text of a configuration file, written
    here.

    accelerate shards on GPUs only, so it is made to take these processes for processes of GPUs.
    """
    if "accelerate" not in given:
        return given
    path = Path(folder, "accelerate.yaml")
    if dist.is_main:
        path.write_text(given["accelerate"], encoding="utf-8")
    dist.barrier()
    if "FSDP" in given["accelerate"]:
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return {"config": str(path)}


def train_case(dist: DistContext, folder: str, case: Case) -> dict[str, Any]:
    """Train the case; return rank 0's records. Weights go to `folder`/final.safetensors."""
    ctx = context(dist, folder, SEED)
    policy = PrecisionPolicy(compute=case.compute, master=case.master, reduce="fp32")
    precision, plan = policy.run(ctx), case.optimizer.run(ctx)
    source = source_of(ctx, case)
    fields = wrap_fields(dict(case.fields), folder, dist)
    engine = Strategy(use=case.wrap, fields=fields).stage().run(ctx, source, precision, plan)
    checkpoints = ShardedCheckpoint(keep=1).run(ctx, engine, source)
    loop = TrainCausalLm(
        global_batch_size=BATCH, steps=STEPS, log_every=2, eval_every=3, **case.loop
    )
    trained = loop.run(ctx, engine, case.data, plan, checkpoints, source)
    facts = dict(engine.describe())
    checkpoints.close()
    engine.close()
    if dist.is_main:
        save_file(dict(ConsolidateStream().run(ctx, trained)), f"{folder}/final.safetensors")
    dist.barrier()
    return {
        "records": list(records(ctx.run_dir / "metrics.jsonl")),
        "facts": facts,
        "eval_loss": trained.progress.metrics["eval_loss"],
        "folder": folder,
    }


def train_cases(dist: DistContext, folder: str, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Train one case after another in the same processes, each in its own folder."""
    results = {}
    for number, (name, case) in enumerate(cases.items()):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        results[name] = train_case(dist, str(place), case)
    return results
