"""What train.hf_trainer is said to take, beside tensors of real trainings on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline.forecast.phases import BACKWARD, FORWARD, LOAD, UPDATE
from pipeline.forecast.placement import Placement
from pipeline.forecast.result import Extras, Step
from pipeline.forecast.shapes import SampleShape
from pipeline.forecast.site import Site
from pipeline.tracing.meter import Meter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeline.artifacts import Data, Sample
from pipeline.dist import Dist
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.hf_trainer import HfTrainer
from tests.support.processes import run_ranks
from tests.support.runs import ListedSamples, context

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "vocab_size": 3000,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
BLOCK = 2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 352 + 2 * 128
N = 2 * 3000 * 128 + 4 * BLOCK + 128
LENGTH = 128


def metered(dist: Dist, folder: str, fields: dict[str, Any], compute: Any) -> dict[str, int]:
    """Phase -> the most bytes of tensors of this rank while the stage runs."""
    from stages.train import hf_trainer_run

    if dist.world_size == 1:  # as `pipe run` starts one process
        del os.environ["LOCAL_RANK"]
    ctx = context(dist, folder)
    finals: list[Callable[[], object]] = []
    ctx.on_exit = finals.append
    meter = Meter(fake=False)
    plain = hf_trainer_run.SummedLoss

    class Loss(plain):
        def __call__(self, batch: Any) -> Any:
            meter.enter((FORWARD, 0, ""))
            loss = super().__call__(batch)
            meter.enter((BACKWARD, 0, ""))
            return loss

    hf_trainer_run.SummedLoss = Loss  # type: ignore[misc]
    register_optimizer_step_pre_hook(lambda *_: meter.enter((UPDATE, 0, "")))
    ids = np.random.default_rng(0).integers(0, 3000, (32, LENGTH))
    samples = [Sample(input_ids=row, labels=row) for row in ids]
    data = Data(train=ListedSamples(samples), heldout=None, pad_id=0, identity={})
    plan, precision = AdamW().run(ctx), PrecisionPolicy(compute=compute).run(ctx)
    with meter:
        model = HfModel(config=LLAMA, init="random").run(ctx)
        HfTrainer(steps=2, **fields).run(ctx, data, plan, precision, model)
    for call in reversed(finals):
        call()
    return {phase: peak.bytes for (phase, _, _), peak in meter.moments.items()}


def told(
    fields: dict[str, Any], compute: Any, ranks: int, device: str = "cpu"
) -> tuple[Site, tuple[Placement, Step, Extras]]:
    site = Site(ranks=ranks, local_ranks=ranks, device=device)
    precision = PrecisionPolicy(compute=compute).forecast(site)
    optimizer = AdamW().forecast(site, precision)
    model = HfModel(config=LLAMA).forecast(site)
    found = HfTrainer(steps=2, **fields).forecast(
        site, model, SampleShape(length=LENGTH), precision, optimizer
    )
    return site, found


AGAIN = {"activation_checkpointing": True}
CASES = [
    pytest.param(1, "bf16", {"global_batch_size": 6, "micro_batch_size": 2}, id="on 1"),
    pytest.param(2, "fp32", {"global_batch_size": 4}, id="on 2"),
    pytest.param(2, "bf16", {"global_batch_size": 8, "arguments": AGAIN}, id="recomputed"),
]


@pytest.mark.parametrize(("ranks", "compute", "fields"), CASES)
def test_tensors_and_files_are_as_large_as_was_said(
    ranks: int, compute: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    site, (_, step, extras) = told(fields, compute, ranks)
    peaks = {phase: peak.bytes for phase, peak in site.ledger.peaks("device").items()}
    for found in run_ranks(metered, ranks, str(tmp_path), fields, compute):
        for phase in (FORWARD, BACKWARD, UPDATE):
            assert found[phase] == pytest.approx(peaks[phase], rel=0.02), phase
        # random weights are made a tensor at a time, and gloo may let go of what it has sent only
        # when the buckets have been made
        assert 0.98 * peaks[LOAD] < found[LOAD] < peaks[LOAD] + 4.1 * N
    (checkpoint,) = extras.files(step.length)
    assert (checkpoint.what, checkpoint.bytes) == ("1 checkpoint", 12 * N)
    written = sum(file.stat().st_size for file in (tmp_path / "checkpoints/checkpoint-2").iterdir())
    assert written == pytest.approx(checkpoint.bytes, rel=0.02)


def test_replicas_by_hand() -> None:
    """16 bytes a parameter on one GPU, 20 on several, where buckets stay beside gradients."""
    for ranks, each in ((1, 16), (2, 20)):
        site, (placement, step, extras) = told({"global_batch_size": 8}, "bf16", ranks, "cuda")
        peaks = site.ledger.peaks("device")
        assert peaks["optimizer step"].bytes == each * N
        assert peaks["checkpoint"].bytes == (each - 4) * N
        assert (step.microbatches, step.samples, step.tokens) == (1, 8, 8 * LENGTH)
        sent = [(one.collective, one.bytes, one.ranks) for one in placement.traffic(1)]
        assert sent == ([("all-reduce", 4 * N, 2)] if ranks > 1 else [])
        host = {one.phase: one.bytes for one in extras.host}
        assert host == {"checkpoint": 4 * N} | ({"resume": 8 * N} if ranks == 1 else {})


def test_weights_are_sent_before_buckets_are_made() -> None:
    """Of an adapter's training the buckets are small, and two messages are under way."""
    site = Site(ranks=2, local_ranks=2, device="cuda")
    precision = PrecisionPolicy(compute="bf16").forecast(site)
    whole = HfModel(path="meta-llama/Llama-3.1-8B").forecast(site)
    model = Lora(rank=8).forecast(site, whole)
    HfTrainer(steps=2, global_batch_size=2).forecast(
        site,
        model,
        SampleShape(length=128),
        precision,
        AdamW().forecast(site, precision),
    )
    load = site.ledger.peaks("device")["load"].items
    # the table of embeddings is larger than a message of 250 MiB
    assert load["communication buffers"] == 2 * 2 * 128256 * 4096


def test_arguments_that_change_what_it_takes() -> None:
    kept = {}
    for name in ("none", "activation_checkpointing", "gradient_checkpointing"):
        arguments = {} if name == "none" else {name: True}
        site, _ = told({"global_batch_size": 8, "arguments": arguments}, "bf16", 1)
        kept[name] = site.ledger.peaks("device")["forward and loss"].items["activations"]
    assert kept["activation_checkpointing"] == kept["gradient_checkpointing"]
    # four blocks keep their input alone
    block = 20 * 128 + 4 * 32 + 8 * 352 + 4 * 8 + 8
    assert kept["none"] - kept["activation_checkpointing"] == 4 * 8 * LENGTH * (block - 2 * 128)
    arguments = {"torch_compile": True, "use_liger_kernel": True}
    _, (_, _, extras) = told({"global_batch_size": 8, "arguments": arguments}, "bf16", 1)
    assert extras.caveats == [
        "compiled models, which keep less",
        "liger's kernels, which keep less",
    ]


def test_checkpoints_that_are_there_at_once() -> None:
    for keep, number in ((1, 2), (2, 2), (None, 2)):  # of two steps
        fields = {"global_batch_size": 8, "save_every": 1, "keep": keep}
        _, (_, step, extras) = told(fields, "bf16", 1)
        (checkpoint,) = extras.files(step.length)
        assert checkpoint.bytes == number * 12 * N, keep


def test_smaller_micro_batches_are_its_only_saving() -> None:
    (saving,) = HfTrainer(steps=1, global_batch_size=8).savings(2)
    assert saving.fields == {"micro_batch_size": 2}
    assert list(HfTrainer(steps=1, global_batch_size=2).savings(2)) == []
