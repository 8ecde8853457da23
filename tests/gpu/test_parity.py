"""Strategies, adapters and losses on a GPU against a plain loop there: the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.model.hf import ActivationCheckpointing, Compile
from stages.objectives.cross_entropy import CrossEntropy
from tests.gpu.training import (
    LENGTH,
    Case,
    Steps,
    Trained,
    apart,
    engine_of,
    made_steps,
    plain,
    source,
    started,
    train,
)

LOSSES = {"fp32": 1e-5, "bf16": 5e-4}
NORMS = {"fp32": 1e-4, "bf16": 6e-3}
WEIGHTS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest relative difference of losses and norms, and distance of weights as `apart` gives it."""

LORA = {"rank": 4, "alpha": 8.0}
TRAINED = {"all": None, "lora": LORA, "qlora": {**LORA, "quantize": "nf4"}}
"""Fields of adapter.lora; None trains the whole model."""
CHUNK = LENGTH + 5
"""Tokens, which do not divide those of a micro-batch."""


def assert_parity(
    dist: DistContext,
    folder: Path,
    case: Case,
    *,
    objective: Any = None,
    steps: Steps | None = None,
    looser: float = 1.0,
) -> tuple[Trained, Trained]:
    """Train the case with its engine and in the plain loop, which knows no field of model.hf;
    return both's numbers."""
    ctx, compute, steps = started(dist, folder), case.compute, steps or made_steps(dist.device)
    unchanged = source(ctx, replace(case, hf={})).inference_view
    expected, before, after = plain(unchanged, steps, compute, dist.device)
    engine = engine_of(ctx, case)
    found = train(engine, steps, objective=objective)
    distances = apart(engine, before, after)
    engine.close()
    assert found.losses == pytest.approx(expected.losses, rel=looser * LOSSES[compute])
    assert found.norms == pytest.approx(expected.norms, rel=looser * NORMS[compute])
    assert distances
    assert max(distances.values()) < looser * WEIGHTS[compute], distances
    return found, expected


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
@pytest.mark.parametrize("trained", TRAINED)
def test_strategies(
    trained: str, wrap: str, compute: str, gpu: DistContext, tmp_path: Path
) -> None:
    if trained == "qlora":
        pytest.importorskip("bitsandbytes")
    case = Case(wrap=wrap, compute=compute, lora=TRAINED[trained])
    found, expected = assert_parity(gpu, tmp_path, case)
    # Before any update the same operations in the same dtypes give the same; other dtypes do not.
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
def test_the_loss_in_chunks(wrap: str, compute: str, gpu: DistContext, tmp_path: Path) -> None:
    case = Case(wrap=wrap, compute=compute)
    # Products of other shapes are rounded to bf16 at other places.
    looser = 1.0 if compute == "fp32" else 2.0
    assert_parity(gpu, tmp_path, case, objective=CrossEntropy(CHUNK), looser=looser)


def test_weights_in_host_memory(gpu: DistContext, tmp_path: Path) -> None:
    assert_parity(gpu, tmp_path, Case(wrap="wrap.fsdp", fields={"cpu_offload": True}))


@pytest.mark.parametrize("keep", ["nothing", "attention", "matmuls"])
def test_activations_computed_again(keep: str, gpu: DistContext, tmp_path: Path) -> None:
    again = ActivationCheckpointing(keep=keep, offload=keep == "nothing")  # type: ignore[arg-type]
    case = Case(wrap="wrap.fsdp", compute="bf16", hf={"activation_checkpointing": again})
    assert_parity(gpu, tmp_path, case)


@pytest.mark.parametrize(("wrap", "compute"), [("wrap.ddp", "fp32"), ("wrap.fsdp", "bf16")])
def test_compiled_blocks(wrap: str, compute: str, gpu: DistContext, tmp_path: Path) -> None:
    case = Case(wrap=wrap, compute=compute, hf={"compile": Compile(dynamic=False)})
    # Its kernels keep fp32 where eager ones round to bf16 between operations.
    assert_parity(gpu, tmp_path, case, looser=10.0 if compute == "bf16" else 5.0)


@pytest.mark.parametrize(
    ("attention", "compute"),
    [("sdpa", "fp32"), ("sdpa", "bf16"), ("flex_attention", "fp32"), ("flash_attention_2", "bf16")],
)
def test_packed_documents(attention: str, compute: str, gpu: DistContext, tmp_path: Path) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    case = Case(compute=compute, hf={"attention": attention})
    looser = 1.0 if compute == "fp32" else 5.0
    assert_parity(gpu, tmp_path, case, steps=packed_steps(gpu.device), looser=looser)


def packed_steps(device: torch.device) -> Steps:
    """Return the usual steps with samples of two or three documents each."""
    cuts = [[0, 9], [0, 13, 20], [0, 1, 30], [0, 31]]
    positions = torch.arange(LENGTH).repeat(len(cuts), 1)
    for row, starts in enumerate(cuts):
        for start in starts:
            positions[row, start:] = torch.arange(LENGTH - start)
    placed = positions.to(device)
    return [
        [replace(batch, tokens={**batch.tokens, "positions": placed}) for batch in step]
        for step in made_steps(device)
    ]
