"""A checkpoint that training continues from, and packed documents that see each other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.commands.run import ACCEPTABLE
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import ResumeRefused, StageError
from stages.objectives.scoring import ModelScorer
from stages.train.causal_lm import TrainCausalLm
from stages.train.checks import hint_to_retrain, lineage, require_same_lineage, verify_packing
from stages.wrap.torch_engine import ModulePasses
from tests.support.models import filled, random_source, tiny_llama_config
from tests.support.packed import PACKED
from tests.support.runs import context, tiny_model, toy_data

DATA = {"contents": "a" * 64, "sequence_length": 128}
NOW: dict[str, Any] = {
    "model": "b" * 64, "tokenizer": "c" * 64, "data": DATA,
    "seed": 0, "shuffle": True, "global_batch_size": 8,
}  # fmt: skip


def refusal(then: dict[str, Any], *accept: str) -> str:
    """Return the refusal, empty if the training is accepted."""
    try:
        require_same_lineage(NOW, accept, Progress(step=5, lineage=then))
    except ResumeRefused as refused:
        return str(refused)
    return ""


def test_a_further_training_can_be_begun_again(tmp_path: Path) -> None:
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path)
    assert hint_to_retrain(ctx) == ""
    ctx.slot = ctx.training = "chat"
    before = Progress(step=5, lineage={"model": "d"})
    with pytest.raises(ResumeRefused) as refused:
        require_same_lineage(NOW, (), before, hint_to_retrain(ctx))
    assert str(refused.value).endswith(
        f"(to train `chat` again, delete its checkpoints and their line in "
        f"{tmp_path / 'checkpoints.at'}; else start a new run, or if that is intended, the same "
        "command with --accept model)"
    )


@pytest.mark.parametrize(
    ("part", "then", "told"),
    [
        ("model", "d" * 64, f"model was {'d' * 12}, is {'b' * 12}"),
        ("tokenizer", "d" * 64, f"tokenizer was {'d' * 12}, is {'c' * 12}"),
        ("tokenizer", None, f"tokenizer was None, is {'c' * 12}"),
        ("data", {**DATA, "sequence_length": 64}, "data.sequence_length was 64, is 128"),
        ("data", {**DATA, "packing": "best"}, "data.packing was best, is None"),
        ("seed", 1, "seed was 1, is 0"),
        ("shuffle", False, "shuffle was False, is True"),
        ("global_batch_size", 16, "global_batch_size was 16, is 8"),
    ],
)
def test_a_difference_is_told_and_may_be_accepted(part: str, then: object, told: str) -> None:
    refused = refusal({**NOW, part: then})
    assert refused.startswith(f"the checkpoint at step 5 belongs to another training: {told} (")
    assert refused.endswith(f"the same command with --accept {part})")
    others = set(NOW) - {part}
    assert refusal({**NOW, part: then}, *others) == refused
    assert refusal({**NOW, part: then}, part) == ""


def test_the_same_and_the_unknown_are_admitted() -> None:
    assert refusal(NOW) == ""
    assert refusal({part: NOW[part] for part in NOW if part != "model"}) == ""
    assert refusal({}) == ""


def test_each_of_several_differences_has_to_be_accepted() -> None:
    both = {**NOW, "tokenizer": "d" * 64, "data": {**DATA, "contents": "e" * 64}}
    assert refusal(both).endswith("with --accept tokenizer --accept data)")
    assert refusal(both, "tokenizer").endswith("with --accept data)")
    assert refusal(both, "tokenizer", "data") == ""


def test_every_part_can_be_accepted(tmp_path: Path) -> None:
    ctx = context(DistContext(device=torch.device("cpu")), str(tmp_path))
    loop = TrainCausalLm(steps=1, global_batch_size=1)
    told = lineage(loop, ctx, toy_data(), tiny_model(ctx, {}, ""))
    assert (*told, "precision") == ACCEPTABLE
    for part in ACCEPTABLE:
        result = CliRunner().invoke(main, ["resume", str(tmp_path / "none"), "--accept", part])
        assert result.exit_code == 2
        assert "--accept" not in result.output


SAMPLES = [PACKED.train[index] for index in range(len(PACKED.train))]


def alone(model: Any) -> Any:
    """Return a model without an engine around it, for evaluations."""
    passes = ModulePasses(model, ModelScorer(model), DistContext(device=torch.device("cpu")))
    return SimpleNamespace(
        evaluate=passes.evaluate, total=lambda one: one, device=passes.device,
        data_axis=passes.here.data, describe=lambda: {"compute": ["fp32"]},
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Any) -> Any:
    return filled(random_source(tiny_llama_config(vocab_size=64), tmp_path)).train()


def test_what_holds_is_proven(model: Any) -> None:
    verify_packing(alone(model), PACKED, SAMPLES)
    assert model.training


def test_documents_that_see_each_other_are_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.forward

    def seeing(**given: Any) -> Any:
        return whole(**given, attention_mask=torch.ones_like(given["input_ids"]))

    monkeypatch.setattr(model, "forward", seeing)
    with pytest.raises(StageError, match="packing: a document sees the one before it"):
        verify_packing(alone(model), PACKED, SAMPLES)


def test_positions_that_do_not_begin_anew_are_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        verify_packing(alone(model), PACKED, SAMPLES)
