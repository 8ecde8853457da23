"""Checkpoints of transformers' Trainer: names are found where possible, and never guessed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.formats import Reading, StateSource
from pipeline.errors import CheckpointError, StageError
from stages.formats.formats import Canonical
from stages.formats.stored import assembled
from stages.hf.checkpoint import Trainer
from stages.hf.checkpoint_source import identify
from tests.support.runs import TINY


def opened(folder: Path, **reading: Any) -> StateSource:
    form = Trainer()
    assert form.detect(folder)
    return form.open(folder, Reading(**reading))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Return a checkpoint of transformers' Trainer, its model and its optimizer."""
    import transformers

    folder = tmp_path_factory.mktemp("trainer")
    config = transformers.AutoConfig.for_model(**TINY)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.model.layers[1].self_attn.parameters():
        parameter.requires_grad_(False)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 101, (12, 8)).tolist()]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.delenv("LOCAL_RANK", raising=False)  # marks a folder of DeepSpeed
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=3, save_steps=3, per_device_train_batch_size=2,
            learning_rate=1e-3, weight_decay=0.1, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="steps",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
    return folder / "checkpoint-3", model, trainer.optimizer.optimizer


def test_weights_and_moments_by_name(trained: tuple[Path, Any, Any]) -> None:
    folder, model, optimizer = trained
    source = opened(folder, samples=6)
    assert (source.step, source.progress["samples"]) == (3, 6)
    assert source.state.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    named = dict(model.named_parameters())
    assert len(source.state.updates) == 25
    for name, parameter in named.items():
        assert torch.equal(assembled(source, f"weight/{name}"), parameter.detach()), name
        state = optimizer.state.get(parameter)
        assert (name in source.state.frozen) == (not state)
        for moment in ("exp_avg", "exp_avg_sq") if state else ():
            assert torch.equal(assembled(source, f"{moment}/{name}"), state[moment]), name
    assert set(source.state.updates.values()) == {3}
    settings = [(g.settings["lr"], g.settings["weight_decay"]) for g in source.state.groups]
    assert settings == [(1e-3, 0.1), (1e-3, 0.0)]


def test_a_canonical_checkpoint_of_it_holds_the_same(
    trained: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    source = opened(trained[0])
    Canonical().write(source, tmp_path / "step-00000003")
    written = Canonical().open(tmp_path / "step-00000003", Reading())
    assert dataclasses.replace(written.state, shapes={}) == source.state
    assert written.tensors == source.tensors
    for key in source.tensors:
        assert torch.equal(assembled(written, key), assembled(source, key))


@pytest.fixture
def copy(trained: tuple[Path, Any, Any], tmp_path: Path) -> Path:
    return shutil.copytree(trained[0], tmp_path / "checkpoint-3")


def test_nothing_but_tensors_is_read(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("echo boom",)

    others = ["rng_state.pth", "scheduler.pt", "training_args.bin"]
    assert sorted(file.name for file in copy.glob("*.[pb][ti]*")) == ["optimizer.pt", *others]
    for name in others:  # never opened
        torch.save(Bomb(), copy / name)
    opened(copy)
    torch.save({"state": Bomb()}, copy / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer.pt: refused: it holds posix\.system"):
        opened(copy)
    assert "boom" not in capfd.readouterr().out


def test_no_code_of_the_folder_is_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question does not allow it either."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    mark = copy / "it-ran"
    (copy / "conf.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import PretrainedConfig\n"
        "class Own(PretrainedConfig): model_type = 'own'\n"
    )
    own = {"model_type": "own", "auto_map": {"AutoConfig": "conf.Own"}, "architectures": ["Own"]}
    (copy / "config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match="models with remote code are not converted"):
        opened(copy)
    assert not mark.exists()


def test_only_a_model_is_built(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["Trainer"]}))
    with pytest.raises(CheckpointError, match="Trainer is not a model"):
        opened(copy)


def test_files_in_another_layout_than_the_model(copy: Path) -> None:
    """Mixtral's experts are stored separately and are one tensor in the model."""
    import transformers

    sizes = {key: value for key, value in TINY.items() if key != "model_type"}
    config = transformers.MixtralConfig(**sizes, num_local_experts=2)
    transformers.MixtralForCausalLM(config).save_pretrained(copy)
    with pytest.raises(CheckpointError, match=r"in the files and .* \(to use only its weights"):
        opened(copy, weights_only=True)


def test_json_that_is_nested_without_end(copy: Path) -> None:
    (copy / "trainer_state.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json: cannot be read"):
        opened(copy)


def test_without_an_optimizer_there_are_weights(copy: Path) -> None:
    (copy / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: missing; it holds the optimizer's"):
        opened(copy)
    assert opened(copy, weights_only=True).state.kinds() == []


def other_moment(saved: Any) -> None:
    for state in saved["state"].values():
        state["momentum_buffer"] = state.pop("exp_avg")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_moment, "the optimizer kept exp_avg_sq, momentum_buffer"),
        (lambda saved: saved["param_groups"].pop(), "has 1 parameter groups, the Trainer makes 2"),
        (lambda saved: saved["state"].pop(7), r"not as transformers' Trainer writes it .*: 7"),
    ],
)
def test_another_optimizer_is_named(change: Any, message: str, copy: Path) -> None:
    saved = torch.load(copy / "optimizer.pt", weights_only=True)
    change(saved)
    torch.save(saved, copy / "optimizer.pt")
    with pytest.raises(CheckpointError, match=message):
        opened(copy)


def test_shards_with_an_index(copy: Path, tmp_path: Path) -> None:
    whole = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(whole)
    halves = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, own in halves.items():
        save_file({name: whole[name] for name in own}, copy / file)
    index = {name: file for file, own in halves.items() for name in own}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    source = opened(copy)
    assert all(torch.equal(assembled(source, f"weight/{n}"), t) for n, t in whole.items())
    index[names[0]] = "../a.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(StageError, match="points outside its folder"):
        opened(copy)


def test_a_model_that_is_another(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 38}))
    with pytest.raises(CheckpointError, match=r"has shape \(.*\) in the files and \("):
        opened(copy)
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["Mine"]}))
    with pytest.raises(CheckpointError, match="its model cannot be built"):
        opened(copy)


NAMED = [("a", (2, 3)), ("b", (2, 3)), ("c", (4,)), ("d", (2, 3))]


def test_numbers_are_given_names_only_where_there_is_one_way() -> None:
    assert identify([(2, 3), (2, 3), (4,), (2, 3)], NAMED, Path("f")) == ["a", "b", "c", "d"]
    assert identify([(4,), (2, 3)], NAMED, Path("f")) == ["c", "d"]
    assert identify([], NAMED, Path("f")) == []
    with pytest.raises(CheckpointError, match="match none or several of the parameters"):
        identify([(2, 3), (4,)], NAMED, Path("f"))
    with pytest.raises(CheckpointError, match="match none or several of the parameters"):
        identify([(4,), (4,)], NAMED, Path("f"))
