"""Training of the built-in stages on toy samples, on each rank, under the strategy of a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.consolidate.stream import ConsolidateStream
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from tests.parity.reference import CLIP, DECAY, LR, WARMUP
from tests.support.multimodal import whole_source
from tests.support.runs import TINY, context, packed_data, toy_data
from tests.support.strategies import Strategy

SEED, STEPS, BATCH = 7, 6, 8
ADAMW = AdamW(lr=LR, weight_decay=DECAY, warmup_steps=WARMUP, max_grad_norm=CLIP)


def tiny_source(ctx: Any, lora: Any = None, fields: Any = None, **overrides: Any) -> Any:
    """Return the tiny random model of the parity tests, or one of another architecture, or that at
    the `path` among `fields`, which are the fields of model.hf."""
    from stages.adapter.lora import Lora
    from stages.model.hf import HfModel

    config = overrides if "model_type" in overrides else {**TINY, **overrides}
    given: Any = {"config": config, "init": "random", **(fields or {})}
    if "path" in given:
        given = fields
    source = HfModel(**given).run(ctx)
    return source if lora is None else Lora(**lora).run(ctx, source)


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


def train_case(dist: DistContext, folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Train the case; return rank 0's records. Weights go to `folder`/final.safetensors."""
    ctx = context(dist, folder, SEED)
    precision = PrecisionPolicy(
        compute=case.get("compute", "fp32"), master=case.get("master", "fp32"), reduce="fp32"
    ).run(ctx)
    plan = case.get("optimizer", ADAMW).run(ctx)
    if case.get("towers"):
        source: Any = whole_source(ctx, **case["hf"])
    else:
        source = tiny_source(ctx, case.get("lora"), case.get("hf"), **case.get("model", {}))
    wrap = Strategy(use=case["wrap"], fields=wrap_fields(case["fields"], folder, dist)).stage()
    engine = wrap.run(ctx, source, precision, plan)
    checkpoints = ShardedCheckpoint(keep=1).run(ctx, engine, source)
    loop = TrainCausalLm(
        global_batch_size=BATCH, steps=STEPS, log_every=2, eval_every=3,
        **case["batching"], **case.get("loop", {}),
    )  # fmt: skip
    data = packed_data() if case.get("packed") else toy_data()
    trained = loop.run(ctx, engine, data, plan, checkpoints, source)
    facts = dict(engine.describe())
    checkpoints.close()
    engine.close()
    if dist.is_main:
        weights = ConsolidateStream().run(ctx, trained)
        save_file(dict(weights), f"{folder}/final.safetensors")
    dist.barrier()
    return {
        "records": list(records(ctx.run_dir / "metrics.jsonl")),
        "facts": facts,
        "metrics": trained.progress.metrics,
    }
