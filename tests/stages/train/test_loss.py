"""The loss in chunks, and the proof before its use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.contracts.data import Data, MicroBatch, Sample, Samples
from pipeline.contracts.precision import Precision
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.utils.fake_tensors import without_values
from stages.model.documents_compat import known_documents
from stages.optimizer.adamw import AdamW
from stages.train.batches import collate
from stages.train.loss import LossHead, SummedLoss, chunked_cross_entropy
from stages.train.verify_loss import verify_packing
from stages.wrap.ddp import Ddp
from stages.wrap.module_engine import ModuleEngine
from tests.support.models import FAMILIES, filled, random_source, tiny_llama_config
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, source
from tests.support.tier import examples


@examples(60)
@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 50),
    vocabulary=st.integers(1, 30),
    bias=st.booleans(),
    frozen=st.sampled_from(["", "hidden", "weight"]),
    seed=st.integers(0, 1000),
)
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    tokens: int, chunk: int, vocabulary: int, bias: bool, frozen: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {
        "hidden": torch.randn(tokens, 6, generator=generator),
        "weight": torch.randn(vocabulary, 6, generator=generator),
        "bias": torch.randn(vocabulary, generator=generator),
    }
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100

    def run(loss: Any) -> tuple[float, list[torch.Tensor | None]]:
        given = {n: v.clone().requires_grad_(n != frozen) for n, v in values.items()}
        made = loss(given["hidden"], given["weight"], given["bias"] if bias else None) * 0.7
        made.backward()
        return float(made.detach()), [v.grad for v in given.values()]

    ours, found = run(lambda h, w, b: chunked_cross_entropy(h, w, b, labels, chunk))
    whole, expected = run(
        lambda h, w, b: F.cross_entropy(F.linear(h, w, b), labels, reduction="sum")
    )
    assert ours == pytest.approx(whole, rel=1e-5, abs=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_gradients_no_product_is_made_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("stages.train.chunked_loss._add_product", lambda *_: made.append(1))
    hidden, weight = torch.randn(24, 8), torch.nn.Parameter(torch.randn(50, 8))
    labels = torch.randint(0, 50, (24,))
    with torch.no_grad():
        found = chunked_cross_entropy(hidden, weight, None, labels, 4)
    assert not made
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(found, expected)
    chunked_cross_entropy(hidden, weight, None, labels, 4)
    assert len(made) == 6


def test_in_bf16_the_loss_is_that_of_fp32_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).bfloat16()
    weight = torch.randn(2000, 16, generator=generator).bfloat16()
    labels = torch.randint(0, 2000, (300,), generator=generator)
    whole = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    found = chunked_cross_entropy(hidden, weight, None, labels, 64)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(whole), rel=1e-6)


def test_in_bf16_gradients_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.train.chunked_loss.PIECE", 16 * 7)  # seven rows at a time
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(200, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 200, (300,), generator=generator)

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        loss.backward()
        found = [hidden.grad.clone(), weight.grad.clone()]
        hidden.grad = weight.grad = None
        return found

    whole = gradients(F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum"))
    chunked = gradients(chunked_cross_entropy(hidden, weight, None, labels, 8))
    for one, other in zip(chunked, whole, strict=True):
        # as many chunks, summed in bf16, would be off by several per cent
        torch.testing.assert_close(one, other, rtol=1e-2, atol=0.02)


class Alone(ModuleEngine):
    """A model without an engine around it."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, DistContext(device=torch.device("cpu")))

    def describe(self) -> Any:
        return {"compute": ["fp32"]}

    backward = step = state = fragments = restore = sync_compute_weights = None  # type: ignore[assignment]


Alone.__abstractmethods__ = frozenset()


class Packed(Samples):
    """Samples of two documents each."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Sample:
        ids = np.random.default_rng(index).integers(0, 64, 13)
        labels = np.append(ids[1:], 1)
        labels[6] = -100
        return Sample(input_ids=ids, labels=labels, positions=np.array([*range(7), *range(6)]))

    def targets(self, index: int) -> int:
        return 12


PACKED = Data(train=Packed(), heldout=None, pad_id=0, packed=True, identity={})
SAMPLES = [PACKED.train[index] for index in range(len(PACKED.train))]


@pytest.fixture
def model(tmp_path: Any) -> Any:
    return filled(random_source(tiny_llama_config(vocab_size=64), tmp_path)).train()


def test_a_chunked_head_changes_no_loss(model: Any) -> None:
    batch = collate([PACKED.train[0], PACKED.train[1]], 0, torch.device("cpu"))
    whole = SummedLoss()(model, batch)
    whole.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    chunked = SummedLoss(chunk=5)(model, batch)
    chunked.backward()
    assert float(chunked.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_outside_of_the_loss_the_head_gives_logits(model: Any) -> None:
    SummedLoss(chunk=5)(model, collate([PACKED.train[0]], 0, torch.device("cpu")))
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)


def test_what_holds_is_proven(model: Any) -> None:
    verify_packing(Alone(model), PACKED, SAMPLES, SummedLoss())
    assert model.training


def test_documents_that_see_each_other_are_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = SummedLoss()
    whole = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda **given: whole(**given, attention_mask=torch.ones_like(given["input_ids"])),
    )
    with pytest.raises(StageError, match="packing: a document sees the one before it"):
        verify_packing(Alone(model), PACKED, SAMPLES, loss)


def test_positions_that_do_not_begin_anew_are_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = SummedLoss()
    with torch.no_grad():  # attention other than the mean over all tokens
        for name, parameter in model.named_parameters():
            parameter *= 20 if "q_proj" in name or "k_proj" in name else 1
    whole = model.model.rotary_emb.forward

    def elsewhere(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        packed = bool((position_ids == 0).sum() > 1)
        stretched = position_ids * (1 + torch.arange(x.shape[1]) % 2)
        return whole(x, stretched if packed else position_ids)

    monkeypatch.setattr(model.model.rotary_emb, "forward", elsewhere)
    with pytest.raises(StageError, match="packed sample differs from its loss"):
        verify_packing(Alone(model), PACKED, SAMPLES, loss)


def test_a_head_that_is_not_plain_is_refused(model: Any) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.set_output_embeddings(Scaled(8, 64))
    with pytest.raises(StageError, match="head is a Scaled, no plain linear layer"):
        SummedLoss(chunk=4)(model, collate([PACKED.train[0]], 0, torch.device("cpu")))


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
    loss = SummedLoss(chunk=4)
    with pytest.raises(StageError) as caught:
        loss(model, collate([few], 0, torch.device("cpu")))
    assert str(caught.value) == (
        "loss_chunk_size: this model computes something with its logits (caps or scales them, "
        "say), so their loss cannot stand for them (leave out loss_chunk_size)"
    )


def test_changed_logits_are_seen_without_values() -> None:
    with without_values():
        head = LossHead(nn.Linear(4, 8), chunk=2)
        with head.computing_loss(torch.zeros(1, 3, dtype=torch.long)):
            given = head(torch.ones(1, 3, 4))
            head.require_unchanged(given)
            with pytest.raises(StageError):
                head.require_unchanged(given * 2)


def test_the_same_model_without_a_cap_trains_in_chunks(tmp_path: Path) -> None:
    config = tiny_llama_config(vocab_size=64, final_logit_softcapping=None, model_type="gemma2")
    model = filled(random_source(config, tmp_path)).to(torch.bfloat16)
    batch = collate([PACKED.train[0]], 0, torch.device("cpu"))
    chunked = SummedLoss(chunk=4)
    loss = chunked(model, batch)
    loss.backward()
    assert float(model.model.norm.weight.grad.abs().max()) > 0
    assert float(loss.detach()) == pytest.approx(
        float(chunked.in_full(model, batch).detach()), rel=1e-2
    )


def copied_loss(dist: DistContext, folder: str) -> list[float]:
    """Train two steps in chunks under a wrapper that returns a copy of its model's output."""
    ctx = context(dist, folder)
    plan = AdamW().run(ctx)
    precision = Precision(
        master="fp32", compute="fp32", reduce="fp32", buffer=None, loss_scaling=None
    )
    engine = Ddp(static_graph=True).run(ctx, source(ctx, Setting(wrap="ddp")), precision, plan)
    loss = SummedLoss(chunk=4)
    batch = collate([toy_data().train[0]], 0, engine.device)
    found = []
    for _ in range(2):
        found.append(float(engine.accumulate([batch], loss, scale=1.0)))
        engine.step(lr_scale=0.0)
    whole = float(engine.evaluate([batch], loss.in_full))
    engine.close()
    return [each / whole for each in found]


def test_a_wrapper_may_copy_the_loss(tmp_path: Path) -> None:
    assert run_ranks(copied_loss, 2, str(tmp_path))[0] == pytest.approx([1.0, 1.0], rel=1e-5)


def handed_on(change: Any, value: float) -> None:
    """Return a model whose head gives a loss that the rest of the model changes."""
    head = LossHead(torch.nn.Linear(2, 3), 4)
    loss = mock.patch("stages.train.loss.chunked_cross_entropy", return_value=torch.tensor(value))
    with loss, head.computing_loss(torch.tensor([1])):
        head.require_unchanged(change(head(torch.ones(1, 2))))


@pytest.mark.parametrize("value", [2.5, 0.0, math.nan])
@pytest.mark.parametrize(
    "change", [lambda loss: loss, lambda loss: loss.detach(), lambda loss: loss.clone()]
)
def test_the_loss_itself_passes(change: Any, value: float) -> None:
    handed_on(change, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: loss + 1,
        lambda loss: loss.add_(1),
        lambda loss: loss.bfloat16(),
        lambda loss: loss.reshape(1),
    ],
)
def test_anything_else_does_not(change: Any) -> None:
    with pytest.raises(StageError, match="computes something with its logits"):
        handed_on(change, 2.5)


class HostReads(TorchDispatchMode):
    """Counts the values that the host reads from tensors, for which it would wait on a GPU."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_the_host_reads_nothing_in_forward_and_backward(
    chunk: int | None, family: str, tmp_path: Path
) -> None:
    model = filled(random_source(FAMILIES[family], tmp_path))
    tokens = torch.arange(22).reshape(2, 11)
    batch = MicroBatch(input_ids=tokens, labels=tokens)
    objective = SummedLoss(chunk)
    objective(model, batch).backward()
    with HostReads() as reads:
        assert (tokens.sum() > 0).item()
        assert reads.count == 1
        with known_documents(batch):
            objective(model, batch).backward()
    assert reads.count == 1
