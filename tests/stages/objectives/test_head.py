"""The LM head replaced by one that computes scores, and what a model may do with them."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.contracts.precision import Precision
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.utils.tensors import without_values
from stages.batches.layout import collate
from stages.objectives.cross_entropy import CrossEntropy
from stages.objectives.documents_compat import known_documents
from stages.objectives.scoring import ReplacedHead
from stages.optimizer.adamw import AdamW
from stages.wrap.ddp import Ddp
from tests.support.batches import accumulated, evaluated, micro_batch, summed_loss
from tests.support.models import FAMILIES, filled, random_source, tiny_llama_config
from tests.support.packed import PACKED
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, source
from tests.support.syncs import Syncs


@pytest.fixture
def model(tmp_path: Any) -> Any:
    return filled(random_source(tiny_llama_config(vocab_size=64), tmp_path)).train()


def test_outside_of_the_loss_the_head_gives_logits(model: Any) -> None:
    summed_loss(model, collate([PACKED.train[0]], 0, torch.device("cpu")), chunk=5)
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)


def test_a_head_that_is_not_plain_is_refused(model: Any) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.set_output_embeddings(Scaled(8, 64))
    with pytest.raises(StageError, match="head is a Scaled, no plain linear layer"):
        summed_loss(model, collate([PACKED.train[0]], 0, torch.device("cpu")), chunk=4)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma2", "final_logit_softcapping": 30.0},
        {"model_type": "cohere", "logit_scale": 0.25},
    ],
)
def test_a_model_that_computes_with_its_logits_is_refused_at_any_loss(
    changes: Any, compute: Any, tmp_path: Path
) -> None:
    model = filled(random_source(tiny_llama_config(vocab_size=64) | changes, tmp_path)).to(compute)
    few = PACKED.train[0]  # one target: the cap changes a loss of some nats by 1 %
    few.labels[1:] = -100
    with pytest.raises(StageError) as caught:
        summed_loss(model, collate([few], 0, torch.device("cpu")), chunk=4)
    assert str(caught.value) == (
        "loss_chunk_size: this model computes something with its logits (caps or scales them, "
        "say), so their loss cannot stand for them (leave out loss_chunk_size)"
    )


def test_changed_logits_are_seen_without_values() -> None:
    with without_values():
        head = ReplacedHead(nn.Linear(4, 8))
        with head.computing(lambda hidden, head: hidden.sum()):
            given = head(torch.ones(1, 3, 4))
            head.require_unchanged(given)
            with pytest.raises(StageError):
                head.require_unchanged(given * 2)


def test_the_same_model_without_a_cap_trains_in_chunks(tmp_path: Path) -> None:
    config = tiny_llama_config(vocab_size=64, final_logit_softcapping=None, model_type="gemma2")
    model = filled(random_source(config, tmp_path)).to(torch.bfloat16)
    batch = collate([PACKED.train[0]], 0, torch.device("cpu"))
    loss = summed_loss(model, batch, chunk=4)
    loss.backward()
    assert float(model.model.norm.weight.grad.abs().max()) > 0
    whole = summed_loss(model, batch)
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-2)


def copied_loss(dist: DistContext, folder: str) -> list[float]:
    """Train two steps in chunks under a wrapper that returns a copy of its model's output."""
    ctx = context(dist, folder)
    plan = AdamW().run(ctx)
    precision = Precision(
        master="fp32", compute="fp32", reduce="fp32", buffer=None, loss_scaling=None
    )
    engine = Ddp(static_graph=True).run(ctx, source(ctx, Setting(wrap="ddp")), precision, plan)
    batch = collate([toy_data().train[0]], 0, engine.device)
    found = []
    for _ in range(2):
        found.append(float(accumulated(engine, [batch], 1, CrossEntropy(4))))
        engine.step(lr_scales=[0.0])
    whole = float(evaluated(engine, [batch]))
    engine.close()
    return [each / whole for each in found]


def test_a_wrapper_may_copy_the_loss(tmp_path: Path) -> None:
    assert run_ranks(copied_loss, 2, str(tmp_path))[0] == pytest.approx([1.0, 1.0], rel=1e-5)


CHANGES: dict[str, tuple[Any, bool]] = {
    "itself": (lambda loss: loss, True),
    "detached": (lambda loss: loss.detach(), True),
    "copied": (lambda loss: loss.clone(), True),
    "more": (lambda loss: loss + 1, False),
    "more in place": (lambda loss: loss.add_(1), False),
    "narrower": (lambda loss: loss.bfloat16(), False),
    "reshaped": (lambda loss: loss.reshape(1), False),
}
"""What the rest of a model does with a loss that the head returns, and whether that passes."""


@pytest.mark.parametrize("change", CHANGES)
def test_only_the_loss_itself_passes(change: str) -> None:
    made, passes = CHANGES[change]
    for value in (2.5, 0.0, math.nan) if passes else (2.5,):
        head = ReplacedHead(torch.nn.Linear(2, 3))
        refused = pytest.raises(StageError, match="computes something with its logits")
        with (
            contextlib.nullcontext() if passes else refused,
            head.computing(lambda hidden, head, value=value: torch.tensor(value)),
        ):
            head.require_unchanged(made(head(torch.ones(1, 2))))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_the_host_reads_nothing_in_forward_and_backward(
    chunk: int | None, family: str, tmp_path: Path
) -> None:
    model = filled(random_source(FAMILIES[family], tmp_path))
    tokens = torch.arange(22).reshape(2, 11)
    batch = micro_batch(tokens, tokens)
    summed_loss(model, batch, chunk=chunk).backward()
    with Syncs() as waits, known_documents(batch):
        summed_loss(model, batch, chunk=chunk).backward()
    assert waits == []
