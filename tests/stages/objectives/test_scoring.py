"""Everything that an objective can ask for, complete under every division of model and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.contracts.data import MicroBatch
from pipeline.contracts.objective import LossParts, ScoreRequest, Scores
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.objectives.scoring import ModelScorer
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import tiny_source
from tests.support.batches import accumulated, micro_batch
from tests.support.models import filled
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.strategies import STRATEGIES

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
