"""The router's loss beside the cross-entropy: that of transformers' own forward pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import StageError
from pipeline.testing import plan_view
from pipeline.testing.helpers import checked
from stages.model.block_changes import checkpoint_blocks
from stages.model.hf import ActivationCheckpointing, HfModel
from stages.objectives.scoring import RouterLoss
from stages.train.causal_lm import TrainCausalLm
from tests.support.batches import micro_batch, summed_loss
from tests.support.moe import MOE
from tests.support.runs import TINY
from tests.support.tier import spread

KINDS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"]
COEFFICIENT = 0.3
IDS = torch.tensor([[5, 17, 3, 88, 41, 7], [9, 2, 64, 33, 0, 0]])
LABELS = torch.tensor([[17, 3, -100, 41, 7, 11], [2, 64, 33, -100, -100, -100]])
REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)


def built(config: dict[str, Any], **more: Any) -> Any:
    """Return a model with random weights, large enough for uneven routing."""
    settings = {**config, **more}
    torch.manual_seed(3)
    made = AutoConfig.for_model(settings.pop("model_type"), **settings)
    made._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def moe(kind: str) -> Any:
    return built(MOE[kind], router_aux_loss_coef=COEFFICIENT)


def ours(model: nn.Module, loss: RouterLoss, rows: slice, real: Tensor | None = None) -> Tensor:
    """Return a batch's part of the loss of the step, which is all rows."""
    labels = LABELS[rows]
    output = model(input_ids=IDS[rows], use_cache=False, **RouterLoss.arguments)
    logits = output.logits.flatten(0, 1).float()
    summed = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    mask = None if real is None else real[rows]
    targets = int((labels != -100).sum())
    return (summed + targets * loss(output, mask)) / int((LABELS != -100).sum())


def theirs(model: Any, **arguments: Any) -> Tensor:
    loss: Tensor = model(
        input_ids=IDS, labels=LABELS, shift_labels=LABELS, output_router_logits=True,
        use_cache=False, **arguments,
    ).loss  # fmt: skip
    return loss


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: grad.clone() for name, grad in found.items()}


@pytest.mark.parametrize("kind", spread(KINDS, 2))
@pytest.mark.parametrize("padded", [False, True])
def test_one_batch_has_the_loss_of_transformers(kind: str, padded: bool) -> None:
    model = moe(kind)
    loss, mask = RouterLoss(model, "config"), REAL if padded else None
    assert loss.weight == COEFFICIENT
    found = ours(model, loss, slice(None), mask)
    expected = theirs(model, **({"attention_mask": REAL.long()} if padded else {}))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    without = ours(model, RouterLoss(model, 0.0), slice(None), mask)
    assert (found - without).item() > 0.1
    ours_grads, grads = gradients(model, found), gradients(model, expected)
    assert any("experts" not in name and "mlp" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(ours_grads[name], grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("kind", spread(KINDS, 2))
def test_the_last_token_of_a_row_has_no_part_in_it(kind: str) -> None:
    """It is only predicted, so it is not given to the model. transformers' forward pass with labels
    computes it, and counts its experts, which is all that its loss differs by."""
    model = moe(kind)
    ids = torch.tensor([[5, 17, 3, 88, 41, 7, 11], [9, 2, 64, 33, 8, 0, 0]])
    labels = torch.tensor([[5, 17, 3, 88, 41, 7, 11], [9, 2, 64, 33, 8, -100, -100]])
    rows = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    inputs = torch.tensor([[1] * 6 + [0], [1] * 4 + [0] * 3])
    batch = micro_batch(ids[:, :-1], labels[:, 1:], real=inputs[:, :-1].bool())
    found = summed_loss(model, batch, router="config") / int((batch.labels != -100).sum())
    whole = functools.partial(
        model, input_ids=ids, labels=labels, output_router_logits=True, use_cache=False
    )
    expected = whole(attention_mask=inputs).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    ours_grads, grads = gradients(model, found), gradients(model, expected)
    norms = [torch.cat([one.flatten() for one in each.values()]).norm().item()
             for each in (ours_grads, grads)]  # fmt: skip
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    with_last = whole(attention_mask=rows).loss
    assert abs((found - with_last).item()) > 1e-4


def test_a_batch_of_padding_has_a_finite_loss() -> None:
    model = moe("mixtral")
    loss = RouterLoss(model, 1.0)
    output = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), **loss.arguments)
    found = loss(output, torch.zeros(1, 1, dtype=torch.bool))
    assert found.isfinite()
    (0 * found).backward()
    assert all(one.grad is None or bool(one.grad.isfinite().all()) for one in model.parameters())


def test_batches_count_by_their_targets() -> None:
    model = moe("qwen3_moe")
    loss = RouterLoss(model, "config")
    parts = [ours(model, loss, slice(0, 1), REAL), ours(model, loss, slice(1, 2), REAL)]
    alone = []
    for row in (0, 1):
        rows = slice(row, row + 1)
        output = model(input_ids=IDS[rows], use_cache=False, **loss.arguments)
        alone.append(loss(output, REAL[rows]).item())
    plain = [ours(model, RouterLoss(model, 0.0), slice(n, n + 1)) for n in (0, 1)]
    added = (parts[0] + parts[1] - plain[0] - plain[1]).item()
    assert added == pytest.approx((5 * alone[0] + 3 * alone[1]) / 8, rel=1e-4)


def test_recomputed_blocks_have_the_same_gradients() -> None:
    model = moe("mixtral")
    loss = RouterLoss(model, "config")
    expected = gradients(model, ours(model, loss, slice(None)))
    checkpoint_blocks(list(model.model.layers), ActivationCheckpointing())
    found = gradients(model, ours(model, loss, slice(None)))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_an_architecture_without_such_a_loss_is_refused(kind: str) -> None:
    model = built(MOE.get(kind, TINY))
    with pytest.raises(StageError, match="router_loss: the model's architecture has no loss"):
        RouterLoss(model, 0.01)


@pytest.mark.parametrize(
    ("config", "weight", "said"),
    [
        (MOE["mixtral"], "config", []),
        (MOE["mixtral"], None, []),
        (TINY, None, []),
        (TINY, 0.1, ["the model has no experts"]),
        ({**MOE["mixtral"], "output_router_logits": True}, 0.1, []),
        ({**MOE["mixtral"], "output_router_logits": True}, None,
         ["the model's config asks for the loss of its router (output_router_logits)"]),
    ],
)  # fmt: skip
def test_check(config: dict[str, Any], weight: Any, said: list[str]) -> None:
    plan = plan_view({"model": HfModel(config=config)})
    stage = TrainCausalLm(steps=1, global_batch_size=1, router_loss=weight)
    found = [one for one in checked(stage, plan) if one.key == "router_loss"]
    assert [one.message for one in found] == said
    assert all(one.warning == (weight is None) for one in found)
