"""Blocks of a kind share one compiled graph, whatever a strategy puts around and into them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.model.hf import ActivationCheckpointing, Compile, Fp8
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import stage, tiny_source
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.tier import FULL

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("wrap.ddp", {}),
    "fsdp": ("wrap.fsdp", {}),
    "zero1": ("wrap.zero", {"stage": 1}),
    "zero2": ("wrap.zero", {"stage": 2}),
    "zero3": ("wrap.zero", {"stage": 3, "param_persistence_threshold": 0}),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": ActivationCheckpointing()},
    "keeping attention": {"activation_checkpointing": ActivationCheckpointing(keep="attention")},
    "8 bits": {"fp8": Fp8(emulate=True)},
    "LoRA": {},
}
LORA = {"rank": 4, "targets": ("q_proj", "down_proj")}
CASES = [
    *(("ddp", feature) for feature in FEATURES),
    *((strategy, "plain") for strategy in STRATEGIES if strategy != "ddp"),
    *((strategy, feature) for strategy in ("fsdp", "zero3") for feature in ("recomputed", "LoRA")),
]
ALIKE = {
    "ddp keeping attention", "ddp 8 bits", "zero1 plain", "fsdp recomputed", "zero3 LoRA"
}  # fmt: skip
"""Compiled as others are that the quick tier has."""
if not FULL:
    CASES = [case for case in CASES if " ".join(case) not in ALIKE]
BROKEN = {"zero3 LoRA"}
"""Whose frozen parameters have hooks within the block."""


def compiled(dist: DistContext, folder: str) -> dict[str, dict[str, Any]]:
    """Of three steps of each case: compiled graphs, reasons why graphs were broken, the last
    loss."""
    from torch._dynamo.utils import counters

    ctx = context(dist, folder)
    precision = PrecisionPolicy(compute="bf16").run(ctx)
    plan = AdamW(lr=1e-3).run(ctx)
    found = {}
    for strategy, feature in CASES:
        torch._dynamo.reset()
        counters.clear()
        fields = {"compile": Compile(backend="aot_eager"), **FEATURES[feature]}
        use, settings = STRATEGIES[strategy]
        source = tiny_source(ctx, LORA if feature == "LoRA" else None, fields, **SIZES)
        engine = stage(use)(**settings).run(ctx, source, precision, plan)
        loss = torch.zeros(())
        for _ in range(3):
            with engine.microbatch(last=True):
                logits = engine.model(input_ids=torch.arange(16)[None]).logits
                loss = logits.float().square().mean()
                engine.backward(loss)
            engine.step(lr_scale=1.0)
        engine.close()
        found[f"{strategy} {feature}"] = {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": list(counters["graph_break"]),
            "loss": float(loss.detach()),
        }
    return found


@pytest.mark.usefixtures("deepspeed_operators")
def test_blocks_of_a_kind_share_one_graph(tmp_path: Any) -> None:
    (found,) = run_ranks(compiled, 1, str(tmp_path))
    for name, result in found.items():
        feature = name.partition(" ")[2]
        # With LoRA the first block's input, of a frozen embedding, needs no gradient.
        graphs = 2 if feature == "LoRA" else 1
        if name not in BROKEN:
            assert (result["graphs"], result["breaks"]) == (graphs, []), name
        same = found[f"ddp {feature}"]
        assert result["loss"] == pytest.approx(same["loss"], rel=5e-3), name
