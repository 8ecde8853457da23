"""The model of a training as a source: its weights, its identity, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.chain.plan import plan_file
from pipeline.contracts.model import ModelSource
from pipeline.contracts.training import Progress, TrainedRun
from pipeline.distributed.process_group import DistContext
from pipeline.errors import RecipeError, StageError
from stages.adapter.lora import Lora
from stages.consolidate.stream import open_weights
from stages.model.declared import outline
from stages.model.hf import ActivationCheckpointing, HfModel, TrainedModel
from tests.support.models import context
from tests.support.processes import run_ranks
from tests.support.recipes import run_recipe
from tests.support.tiny_recipe import write
from tests.support.two_trainings import TEXT, begin, one, write_files
from tests.support.weights import MemoryWeights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EMA = {"average": {"use": "average.ema", "decay": 0.5}}


def train(dist: DistContext, recipe: str, folder: str) -> None:
    run_recipe(dist, recipe, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and, in `plain` and `lora`, a checkpoint of a training of each
    kind; the plain one keeps an average."""
    folder = write_files(tmp_path_factory.mktemp("files"))
    for name, adapter in (("plain", None), ("lora", {"use": "adapter.lora", "rank": 2})):
        slots = one(TEXT, "wrap.ddp", 2)
        stages: dict[str, Any] = begin("./model", adapter)
        for slot, fields in slots.items():
            stages[slot] = fields
            stages |= EMA if slot == "wrap" and adapter is None else {}
        recipe = write(folder / f"{name}.yaml", stages)
        (folder / name).mkdir()
        run_ranks(train, 1, str(recipe), str(folder / name))
    return folder


def base(folder: Path, **fields: Any) -> ModelSource:
    return HfModel(path=str(folder / "model"), **fields).run(context(folder))


def result(run: Path) -> TrainedRun:
    """Return what the run's training has returned."""
    events = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    (record,) = [
        one["record"]
        for one in events
        if one["event"] == "slot finished" and one["slot"] == "train"
    ]
    progress = Progress.from_record(record["progress"])
    return TrainedRun(checkpoint=str(run / "checkpoints" / "step-00000002"), progress=progress)


def opened(folder: Path, name: str, model: ModelSource | None = None, **fields: Any) -> ModelSource:
    model = model or base(folder)
    if name == "lora":
        model = Lora(rank=2).run(context(folder), model)
    return TrainedModel(**fields).run(context(folder), result(folder / name), model)


def tensors(source: ModelSource) -> Mapping[str, torch.Tensor]:
    with contextlib.closing(source.weights()) as reader:
        return {name: reader.read(name) for name in reader.names()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_the_checkpoint_s_in_a_dtype(folder: Path, dtype: str) -> None:
    source = opened(folder, "plain", dtype=dtype)
    saved = open_weights(str(folder / "plain" / "checkpoints" / "step-00000002"))
    found = tensors(source)
    assert found.keys() == outline(source).state_dict().keys()
    for name, tensor in found.items():
        assert tensor.dtype == DTYPES[dtype]
        assert torch.equal(tensor, saved.read(name).to(DTYPES[dtype]))
    assert all(torch.equal(found[n], t) for n, t in tensors(source.export_view).items())


def test_the_average_is_other_weights(folder: Path) -> None:
    plain, average = (opened(folder, "plain", weights=which) for which in ("model", "ema"))
    assert not torch.equal(*(tensors(one)["lm_head.weight"] for one in (plain, average)))
    assert plain.fingerprint != average.fingerprint
    with pytest.raises(StageError, match="holds no ema of the weights"):
        opened(folder, "lora", weights="ema").weights()


def test_an_adapter_is_merged_and_gone(folder: Path) -> None:
    source = opened(folder, "lora", dtype="fp32")
    assert not source.frozen_base
    assert all(one.requires_grad for one in outline(source).parameters())
    before, after = tensors(base(folder)), tensors(source)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.split(".")[-2].endswith("_proj") for name in changed)


def test_it_is_built_as_the_model_slot_says(folder: Path) -> None:
    model = base(folder, activation_checkpointing=ActivationCheckpointing())
    for name in ("plain", "lora"):
        source = opened(folder, name, model)
        for each, recomputes in ((source, True), (source.export_view, False)):
            replaced = ["forward" in vars(block) for block in each.blocks(each.build())]
            assert replaced == [recomputes] * 2


def test_its_identity_is_the_checkpoint_s_wherever_that_lies(folder: Path, tmp_path: Path) -> None:
    source = opened(folder, "plain")
    shutil.copytree(folder / "plain", tmp_path / "plain", copy_function=shutil.copyfile)
    moved = TrainedModel().run(context(folder), result(tmp_path / "plain"), base(folder))
    for name in ("fingerprint", "sampled_contents", "contents"):
        assert getattr(moved, name) == getattr(source, name)
    other = opened(folder, "plain", dtype="fp32")
    assert (source.contents == other.contents, source.fingerprint == other.fingerprint) == (
        True, False,
    )  # fmt: skip
    assert opened(folder, "lora").contents != source.contents
    assert (source.location, source.revision) == (None, None)


def test_another_model_is_not_the_one_that_was_trained(folder: Path) -> None:
    other = base(folder, init="random")
    with pytest.raises(StageError, match="is not the model that was trained"):
        opened(folder, "plain", other)
    ctx = context(folder)
    ctx.accept = frozenset({"model"})
    assert TrainedModel().run(ctx, result(folder / "plain"), other).fingerprint


def test_an_average_that_no_training_keeps(folder: Path) -> None:
    stages = begin("./model") | one(TEXT, "wrap.ddp", 2)
    stages |= {"trained": {"use": "model.trained", "weights": "ema"}}
    with pytest.raises(RecipeError, match=r"trained\.weights: this recipe's training keeps no av"):
        plan_file(write(folder / "ema.yaml", stages))


def test_weights_that_stay_frozen_are_those_of_the_training_before(folder: Path) -> None:
    model = base(folder, frozen=("*.layers.0.*",))
    source = opened(folder, "lora", model, dtype="fp32")
    assert source.frozen_base == model.frozen_base
    merged, plain = tensors(source), tensors(model)
    kept = {name: one + 1 for name, one in merged.items() if name not in source.frozen_base}
    exported = source.merge_trained(MemoryWeights(kept))
    assert set(exported.names()) == set(merged)
    for name in merged:
        expected = kept.get(name, merged[name])
        assert torch.equal(exported.read(name), expected), name
    changed = "model.layers.0.self_attn.q_proj.weight"  # by the adapter
    assert not torch.equal(merged[changed], plain[changed])
