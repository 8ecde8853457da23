"""Perplexity of an exported model, against a plain computation."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.data import NO_TARGET
from pipeline.contracts.export import ExportedModel
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError, UsageError
from pipeline.testing import plan_view, problems
from stages.evaluate.lm import EvaluatedModel, EvaluateLm
from stages.evaluate.run import windows
from stages.export.safetensors import ExportSafetensors
from stages.model.hf import HfModel
from tests.support.models import context, filled, random_source, save_tokenizer, tiny_llama_config
from tests.support.processes import run_ranks
from tests.support.runs import context as rank_context
from tests.support.weights import trained

VIEW = plan_view({})
DOCUMENTS = ["a b c a b", "c", "b b a c c c a a b a c b a"]
IDS = {"a": 3, "b": 4, "c": 5}


LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4,
    "short_factor": [1.0] * 3, "long_factor": [4.0, 5.0, 6.0],
}  # fmt: skip


def test_with_pins_data_of_tasks_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text('task: "mine"  # ours\ndataset_path: json\n')
    stage = EvaluateLm(tasks=("mine", "arc_easy", "piqa"), task_folder=str(tmp_path))
    said = "lm-eval names no commit of the data of arc_easy, piqa"
    for pinned in (False, True):
        monkeypatch.setenv("PIPE_PINNED", str(int(pinned)))
        found = [one.message for one in stage.check(VIEW)]
        assert (said in found) == pinned
    ours = replace(stage, tasks=("mine",))
    assert not [one for one in ours.check(VIEW) if "commit" in one.message]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[HfModel, Path, Any]:
    """Return a source with a tokenizer, its export in fp32, and the module."""
    return exported(tmp_path_factory.mktemp("model"), tiny_llama_config())


def exported(folder: Path, config: dict[str, Any]) -> tuple[HfModel, Path, Any]:
    made = filled(random_source(config, folder))
    made.save_pretrained(folder / "source")
    save_tokenizer(folder / "source")
    stage = HfModel(path=str(folder / "source"))
    ctx = context(folder)
    source = stage.run(ctx)
    export = ExportSafetensors(folder=str(folder / "export"), dtype="fp32")
    weights = trained(source)
    export.run(ctx, weights, source)
    exact = filled(source, weights)
    return stage, folder / "export", exact


@pytest.fixture
def files(tmp_path: Path) -> str:
    lines = [json.dumps({"text": document}) for document in DOCUMENTS]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "text.jsonl")


def evaluated(
    model: tuple[HfModel, Path, Any], tmp_path: Path, **fields: Any
) -> tuple[dict[str, Any], EvaluatedModel]:
    stage, export, _ = model
    ctx = replace(context(tmp_path), slot="measure")
    exported = ExportedModel(folder=export, files=[], total_bytes=0)
    found = EvaluateLm(**fields).run(ctx, exported, stage.run(ctx))
    return dict(found.results["text"]), found


def plain(module: Any, start: list[int], window: int, stride: int) -> tuple[float, int]:
    """Return the sum of -log p over single tokens, each with the context of its window, and their
    number."""
    total, count = 0.0, 0
    for document in DOCUMENTS:
        ids = start + [IDS[word] for word in document.split()]
        for place in range(1, len(ids)):
            # the first window, in steps of `stride`, that reaches the token before it
            begin = max(0, math.ceil((place - window) / stride) * stride)
            with torch.no_grad():
                logits = module(torch.tensor([ids[begin:place]]), use_cache=False).logits[0, -1]
            total -= float(torch.log_softmax(logits.double(), -1)[ids[place]])
            count += 1
    return total, count


@pytest.mark.parametrize(
    ("window", "stride", "batch_size"),
    [(64, None, 1), (4, 2, 3), (5, 5, 2), (6, 1, 4), (3, None, 1)],
)
def test_perplexity_is_that_of_a_plain_computation(
    model: Any, files: str, tmp_path: Path, window: int, stride: int | None, batch_size: int
) -> None:
    fields = {"files": files, "window": window, "stride": stride, "batch_size": batch_size}
    told, _ = evaluated(model, tmp_path, **fields)
    total, count = plain(model[2], [], window, stride or max(window // 2, 1))
    assert count == 4 + 0 + 12
    assert (told["tokens"], told["documents"]) == (count, 3)
    assert told["loss"] == pytest.approx(total / count, rel=1e-5)
    assert told["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert "bits_per_byte" not in told


def test_angles_do_not_depend_on_other_windows(files: str, tmp_path: Path) -> None:
    made = exported(tmp_path, tiny_llama_config(rope_parameters=LONG, initializer_range=0.5))
    alone, together = (
        evaluated(made, tmp_path, files=files, batch_size=size)[0]["loss"] for size in (1, 3)
    )
    assert together == pytest.approx(alone, rel=1e-6)


def test_with_a_start_token_every_token_is_scored(model: Any, files: str, tmp_path: Path) -> None:
    told, found = evaluated(model, tmp_path, files=files, prepend_bos=True)
    total, count = plain(model[2], [1], 1024, 512)
    assert count == told["tokens"] == 5 + 1 + 13
    assert told["loss"] == pytest.approx(total / count, rel=1e-5)
    size = sum(len(document) for document in DOCUMENTS)
    assert told["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written == {"measure": {"model": str(model[1]), "text": told}}
    assert EvaluatedModel.restore(found.record()) == found
    (tmp_path / "evaluation.json").write_text(
        json.dumps(written).replace('"tokens": 1', '"tokens": 2')
    )
    with pytest.raises(StageError, match=r"slot `measure` has other results than were measured"):
        EvaluatedModel.restore(found.record())
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(StageError, match=r"evaluation\.json has nothing of slot `measure`"):
        EvaluatedModel.restore(found.record())


def on_rank(dist: DistContext, folder: str, source: str, export: str, files: str) -> dict[str, Any]:
    ctx = replace(rank_context(dist, folder), slot="measure")
    exported = ExportedModel(folder=Path(export), files=[], total_bytes=0)
    found = EvaluateLm(files=files, window=4).run(ctx, exported, HfModel(path=source).run(ctx))
    return dict(found.results)


def test_all_ranks_have_the_result(model: Any, files: str, tmp_path: Path) -> None:
    alone, _ = evaluated(model, tmp_path, files=files, window=4)
    stage, export, _ = model
    told = run_ranks(on_rank, 2, str(tmp_path), str(stage.path), str(export), files)
    assert told[0] == told[1]
    assert told[0]["text"] == pytest.approx(alone)


def test_a_window_beyond_the_positions_is_refused(model: Any, files: str, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="window is 65, and the model has 64 positions"):
        evaluated(model, tmp_path, files=files, window=65)


def test_nothing_to_score_is_said(model: Any, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\n")
    with pytest.raises(StageError, match="no document has two tokens"):
        evaluated(model, tmp_path, files=str(tmp_path / "one.txt"))


def test_tasks_need_their_package(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = problems(EvaluateLm, {"tasks": ["hellaswag"]})
    assert [str(problem) for problem in told] == [
        "tasks: needs the package lm_eval, which is not installed "
        "(pip install 'pipetrain[evaluate]')"
    ]


@given(length=st.integers(0, 40), window=st.integers(2, 12), stride=st.integers(1, 12))
def test_windows_score_every_token_but_the_first_once(
    length: int, window: int, stride: int
) -> None:
    stride = min(stride, window)
    scored = []
    for sample in windows(range(100, 100 + length), window, stride):
        assert 1 <= len(sample.input_ids) <= window
        assert (sample.input_ids + 1).tolist()[:-1] == sample.input_ids.tolist()[1:]
        own = sample.labels != NO_TARGET
        assert (sample.labels[own] == sample.input_ids[own] + 1).all()
        if scored:  # beyond the first window: enough context
            assert sample.labels[own][0] - sample.input_ids[0] - 1 >= window - stride
        scored += sample.labels[own].tolist()
    assert scored == list(range(101, 100 + length))


def test_a_folder_of_tasks_is_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """lm-eval imports what its YAML names, and renders templates without a sandbox."""
    (tmp_path / "x.yaml").write_text("task: x\ndoc_to_text: !function run.it\n")
    fields = {"tasks": ["x"], "task_folder": str(tmp_path)}
    stage = EvaluateLm(tasks=("x",), task_folder=str(tmp_path))
    monkeypatch.setenv("PIPE_TRUST_REMOTE_CODE", "0")
    told = f"code of the tasks in {tmp_path} would run (--trust-remote-code allows it; read the"
    (found,) = (each for each in problems(EvaluateLm, fields) if each.key == "task_folder")
    assert found.message.startswith(told)
    exported = ExportedModel(folder=model[1], files=[], total_bytes=0)
    with pytest.raises(UsageError, match="would run"):
        stage.run(context(tmp_path), exported, model[0].run(context(tmp_path)))
    monkeypatch.setenv("PIPE_TRUST_REMOTE_CODE", "1")
    assert not [each for each in problems(EvaluateLm, fields) if each.key == "task_folder"]
