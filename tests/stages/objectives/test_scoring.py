"""Everything that an objective can ask for, complete under every division of model and tokens; the
replaced head; the router's loss."""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.contracts.data import MicroBatch
from pipeline.contracts.objective import LossParts, ScoreRequest, Scores
from pipeline.contracts.optimizer import Precision
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.testing import plan_view
from pipeline.testing.conformance import checked
from pipeline.utils.tensors import without_values
from stages.batches.layout import collate
from stages.model.block_changes import checkpoint_blocks
from stages.model.hf import ActivationCheckpointing, HfModel
from stages.objectives.compat import known_documents
from stages.objectives.cross_entropy import CrossEntropy
from stages.objectives.scoring import ModelScorer, ReplacedHead, RouterLoss
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from stages.wrap.ddp import Ddp
from tests.parity.body import tiny_source
from tests.support.batches import accumulated, evaluated, micro_batch, summed_loss
from tests.support.models import FAMILIES, filled, random_source, tiny_llama_config
from tests.support.moe import MOE
from tests.support.packed import PACKED
from tests.support.processes import run_ranks
from tests.support.runs import TINY, context, toy_data
from tests.support.state import Setting, source
from tests.support.strategies import STRATEGIES
from tests.support.syncs import Syncs
from tests.support.tier import spread

LINES, LENGTH, VOCABULARY, ASKED = 3, 10, 101, 4
LAYOUTS = [
    ("ddp", 1), ("ddp context", 2), ("fsdp tensor", 2), ("fsdp tensor context", 4),
    ("fsdp pipeline", 2), ("zero3", 2),
]  # fmt: skip


def batch() -> MicroBatch:
    """Return lines of uneven lengths with a column of ids."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (LINES, LENGTH), generator=draw)
    labels = torch.randint(1, VOCABULARY, (LINES, LENGTH), generator=draw)
    labels[torch.rand(LINES, LENGTH, generator=draw) < 0.3] = -100
    real = torch.arange(LENGTH) < torch.tensor([[10], [7], [4]])
    labels[~real] = -100
    order = torch.rand(LINES, LENGTH, VOCABULARY, generator=draw).argsort(-1)
    made = micro_batch(ids, labels, real=real)
    return MicroBatch(tokens={**made.tokens, "ids": order[..., :ASKED]})


class Everything:
    """Objective: a product of sums of all that there is of a row."""

    units = ("rows",)
    metrics: Any = {"total": "rows"}

    def __init__(self, chunk: int | None) -> None:
        self.request = ScoreRequest(
            total=True, tokens=True, entropy=True, candidates="ids", chunk=chunk
        )

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        found = (scores.tokens, scores.entropy, scores.candidates)
        return LossParts(terms={"rows": judged(batch, *found)}, sums={"total": scores.total})


def judged(batch: MicroBatch, tokens: Tensor, entropy: Tensor, candidates: Tensor) -> Tensor:
    weights = 0.5 + 0.1 * torch.arange(batch.input_ids.shape[1])
    each = torch.linspace(0.1, 0.3, ASKED + 1)
    sums = [batch.sum_rows(one * weights) for one in (tokens, entropy, (candidates * each).sum(-1))]
    return (sums[0] * sums[1].tanh() + sums[2].square() / 50).sum()


class Ends:
    """Measure: the logits after each row."""

    request = ScoreRequest(logits=True)
    width = VOCABULARY

    def __call__(self, scores: Scores, batch: MicroBatch) -> Tensor:
        return scores.logits


def scored(
    dist: DistContext, folder: str, name: str, chunk: int | None
) -> tuple[float, float, list[list[float]]]:
    """Return loss and gradient norm of Everything, and the logits after each row."""
    ctx = context(dist, folder)
    precision = PrecisionPolicy(compute="fp32", reduce="fp32").run(ctx)
    plan = AdamW(max_grad_norm=None).run(ctx)
    stage = STRATEGIES[name].stage()
    engine = stage.run(ctx, tiny_source(ctx), precision, plan)
    # Every data-parallel rank has the same.
    counts = LINES * engine.data_axis.count
    (rows,) = engine.evaluate([batch()], Ends())
    ends = torch.zeros(LINES, VOCABULARY, dtype=torch.float64)
    if rows is not None:
        ends += rows
    ends = engine.total(ends) / engine.data_axis.count
    loss = float(engine.total(accumulated(engine, [batch()], counts, Everything(chunk))))
    norm = float(engine.step(lr_scales=[0.0]).grad_norm)
    engine.close()
    return loss / counts, norm, ends.tolist()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float, Tensor]:
    """Compute the same with all logits in plain torch."""
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path_factory.mktemp("plain"))
    model, given = filled(tiny_source(ctx)), batch()
    logits = model(input_ids=given.input_ids, use_cache=False).logits
    log_probs, trained = F.log_softmax(logits, -1), given.labels != -100
    tokens = log_probs.gather(-1, given.labels.clamp(min=0)[..., None])[..., 0] * trained
    entropy = -(log_probs.exp() * log_probs).sum(-1) * trained
    found = log_probs.gather(-1, given.tokens["ids"])
    rest = torch.log(1 - found.exp().sum(-1, keepdim=True))
    loss = judged(given, tokens, entropy, torch.cat([found, rest], -1) * trained[..., None]) / LINES
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf))
    return float(loss.detach()), norm, logits[torch.arange(LINES), [9, 6, 3]].detach()


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_scores_are_complete(
    name: str, ranks: int, chunk: int | None, expected: tuple[float, float, Tensor], tmp_path: Path
) -> None:
    loss, norm, ends = run_ranks(scored, ranks, str(tmp_path), name, chunk)[0]
    assert loss == pytest.approx(expected[0], rel=2e-6)
    assert norm == pytest.approx(expected[1], rel=1e-5)
    torch.testing.assert_close(torch.tensor(ends), expected[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("more", [{"entropy": True}, {"candidates": "ids"}])
def test_a_total_next_to_other_scores_is_that_of_the_tokens(
    more: dict[str, Any], chunk: int | None, tmp_path: Path
) -> None:
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path)
    run, given = ModelScorer(filled(tiny_source(ctx))), batch()
    both = run(given, given, ScoreRequest(total=True, chunk=chunk, **more))
    only = run(given, given, ScoreRequest(total=True))
    torch.testing.assert_close(both.total, only.total)


@pytest.mark.parametrize("divided", ["sequence", "layers"])
def test_the_loss_of_a_router_is_refused_where_it_would_be_of_a_part(
    divided: str, tmp_path: Path
) -> None:
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path)
    group: Any = object() if divided == "sequence" else None
    run, given = ModelScorer(filled(tiny_source(ctx)), group), batch()
    inputs = {"inputs_embeds": torch.zeros(LINES, LENGTH, 24)} if divided == "layers" else {}
    with pytest.raises(StageError, match="asks for the router's loss, a mean over whole sequences"):
        run(given, given, ScoreRequest(total=True, router=1.0), **inputs)


class Outputs:
    """Objective: the outputs of a head that is not over the vocabulary."""

    request = ScoreRequest(values=True)
    units = ("rows",)
    metrics: Any = {}

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        return LossParts(terms={"rows": scores.values.sin().sum()})


class Asked:
    """Measure: the log-probability of an id, whether the vocabulary has it or not."""

    request = ScoreRequest(candidates="ids")
    width = 1

    def __call__(self, scores: Scores, batch: MicroBatch) -> Tensor:
        return batch.sum_rows(scores.candidates[..., 0])[:, None]


def valued(dist: DistContext, folder: str, name: str) -> tuple[float, float, list[bool]]:
    """Return loss and gradient norm of Outputs, and whether each row's candidates are numbers when
    one row asks for an id that there is not."""
    ctx = context(dist, folder)
    precision = PrecisionPolicy(compute="fp32", reduce="fp32").run(ctx)
    plan = AdamW(max_grad_norm=None).run(ctx)
    engine = STRATEGIES[name].stage().run(ctx, tiny_source(ctx), precision, plan)
    counts = LINES * engine.data_axis.count
    loss = float(engine.total(accumulated(engine, [batch()], counts, Outputs()))) / counts
    norm = float(engine.step(lr_scales=[0.0]).grad_norm)
    odd = batch()
    if name != "ddp":  # plain torch refuses it
        odd.tokens["ids"][1, :, 0] = VOCABULARY
    (rows,) = engine.evaluate([odd], Asked())
    engine.close()
    return loss, norm, [] if rows is None else rows[:, 0].isfinite().tolist()


def test_outputs_and_ids_are_whole_where_ranks_divide_the_head(tmp_path: Path) -> None:
    loss, norm, _ = run_ranks(valued, 1, str(tmp_path / "one"), "ddp")[0]
    found = run_ranks(valued, 2, str(tmp_path / "two"), "fsdp tensor")
    assert found[0][:2] == pytest.approx((loss, norm), rel=1e-5)
    assert found[0][2] == [True, False, True]


def test_a_head_that_is_no_vocabulary_gives_values(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=8, num_labels=2,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    model, given = AutoModelForTokenClassification.from_config(config).eval(), batch()
    scores = ModelScorer(model)(given, given, ScoreRequest(values=True))
    whole = model(input_ids=given.input_ids).logits
    assert torch.equal(scores.values, whole)
    at_ends = scores.values.flatten(0, 1)[given.row_ends()]
    assert torch.equal(at_ends, whole[torch.arange(LINES), [9, 6, 3]])
    both = ScoreRequest(values=True, tokens=True)
    with pytest.raises(StageError, match="asks for values, and for scores of a vocabulary"):
        ModelScorer(model)(given, given, both)


def test_what_was_not_asked_for_is_named() -> None:
    with pytest.raises(StageError, match=r"scores\.entropy, which its request does not ask for"):
        _ = Scores(total=torch.zeros(())).entropy


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


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_rank_without_samples_adds_nothing(chunk: int | None) -> None:
    """It takes part with one token of padding, of which the router's loss would be no number."""
    model = moe("mixtral")
    loss = summed_loss(model, collate([], 0, torch.device("cpu")), chunk=chunk, router=1.0)
    assert float(loss.detach()) == 0.0
    assert not any(grad.any() for grad in gradients(model, loss).values())


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
