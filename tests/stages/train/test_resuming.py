"""Differences that a resumed training may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.commands.run import ACCEPTABLE
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import ResumeRefused
from stages.train.causal_lm import TrainCausalLm
from stages.train.resuming import hint_to_retrain, lineage, require_same_lineage
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
