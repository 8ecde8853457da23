"""Nodes whose files or recipes differ train no mixture: the run ends before the first step, with
what differs and where. Both nodes are this machine; their paths come from the environment."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.stages.data.fakes import FakeSource
from tests.support.models import tiny_llama_config
from tests.support.pipe import Outcome, Pipe
from tests.support.ports import free_port
from tests.support.tiny_recipe import losses

Nodes = Callable[..., list[Outcome]]


@pytest.fixture
def nodes(pipe: Pipe, tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    """Run a recipe of `slots` on two nodes of one rank, each under variables of its own."""

    def run(slots: Mapping[str, Any], *own: Mapping[str, str]) -> list[Outcome]:
        recipe = pipe.folder / "recipe.yaml"
        launch = {"procs": 1, "device": "cpu", "restarts": {"limit": 0}}
        content = {"name": "two", "env": sorted(own[0]), "launch": launch, "stages": slots}
        recipe.write_text(json.dumps(content))
        where = f"127.0.0.1:{free_port()}"
        command = ("run", str(recipe), "--run-dir", str(pipe.run_dir), "--nodes", "2")
        started = [
            pipe.fork(
                tmp_path_factory.mktemp("said"), *command, "--rdzv", where, "--node-rank", str(n),
                **own[n],
            )
            for n in range(2)
        ]  # fmt: skip
        return [node.end() for node in started]

    return run


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Return the folders of one model with a tokenizer, on two machines."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_llama_config(vocab_size=300))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "first")
    FakeSource().fast.save_pretrained(tmp_path / "first")
    return [tmp_path / "first", Path(shutil.copytree(tmp_path / "first", tmp_path / "second"))]


@pytest.fixture
def rows(tmp_path: Path) -> list[Path]:
    """Return one file of chats, on two machines."""
    turns = [{"role": "user", "content": "rain"}, {"role": "assistant", "content": "no"}]
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file in files:
        file.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    return files


def slots(**changed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a chain whose model and data are at the environment's paths."""
    chain: dict[str, dict[str, Any]] = {
        "model": {"use": "model.hf", "path": "${oc.env:MODEL}"},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {"use": "data.chat", "files": "${oc.env:ROWS}", "sequence_length": 64},
        "optimizer": {"use": "optimizer.adamw", "lr": 0.01},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {
            "use": "train.causal_lm", "steps": 1, "global_batch_size": 2, "micro_batch_size": 1,
        },
    }  # fmt: skip
    for slot, fields in changed.items():
        chain[slot] = {**chain.get(slot, {}), **fields}
    if "adapter" in chain:  # behind the model
        chain = {"model": chain.pop("model"), "adapter": chain.pop("adapter"), **chain}
    return chain


def apart(models: Sequence[Path], rows: Sequence[Path], **more: Sequence[str]) -> list[Any]:
    """Return the variables of both nodes."""
    own = {"MODEL": models, "ROWS": rows, **more}
    return [{name: str(both[n]) for name, both in own.items()} for n in range(2)]


def change(folder: Path, tensor: str) -> None:
    """Change one tensor of a model's weights."""
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor] += 0.1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refused(found: Sequence[Outcome], pipe: Pipe) -> str:
    """Return what the run failed with, before the first step."""
    assert [node.code for node in found] == [1, 1], found
    assert "Traceback" not in found[0].stderr
    assert not losses(pipe.run_dir)
    return found[0].stderr


PLACES = f"on rank 1 (node 1, {socket.gethostname()})"


def test_files_in_other_places_are_the_same(
    pipe: Pipe, nodes: Nodes, models: list[Path], rows: list[Path]
) -> None:
    found = nodes(slots(), *apart(models, rows))
    assert [node.code for node in found] == [0, 0], found
    log = (pipe.run_dir / "logs" / "rank-00000.log").read_text()
    assert "data and the tokenizer are compared: data.files is " in log
    assert "; model.path is " in log
    assert "all 2 ranks have the same: the model's config, and of its weights size, header" in log


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_other_weights(
    pipe: Pipe, nodes: Nodes, models: list[Path], rows: list[Path], tensor: str
) -> None:
    change(models[1], tensor)
    said = refused(nodes(slots(), *apart(models, rows)), pipe)
    assert "do not have the same model: " in said
    assert PLACES in said


def test_another_base_of_an_adapter(
    pipe: Pipe, nodes: Nodes, models: list[Path], rows: list[Path]
) -> None:
    change(models[1], "model.layers.0.self_attn.q_proj.weight")
    chain = slots(adapter={"use": "adapter.lora", "rank": 2, "alpha": 2})
    assert "do not have the same model: " in refused(nodes(chain, *apart(models, rows)), pipe)


def test_another_chat_template(
    pipe: Pipe, nodes: Nodes, models: list[Path], rows: list[Path]
) -> None:
    template = models[1] / "chat_template.jinja"
    template.write_text(template.read_text().replace("narrator", "reader"))
    said = refused(nodes(slots(), *apart(models, rows)), pipe)
    assert "do not have the same tokenizer: template is " in said
    assert "tokenizer is " not in said


def test_another_recipe(pipe: Pipe, nodes: Nodes, models: list[Path], rows: list[Path]) -> None:
    chain = slots(optimizer={"schedule": "${oc.env:SHAPE}"})
    said = refused(nodes(chain, *apart(models, rows, SHAPE=["cosine", "linear"])), pipe)
    assert "do not have the same recipe: optimizer.schedule is ${oc.env:SHAPE} (" in said
    assert "cosine" not in said  # it may be a secret


def test_other_data(
    pipe: Pipe, nodes: Nodes, models: list[Path], rows: list[Path], tmp_path: Path
) -> None:
    rows[1].write_text(rows[1].read_text().replace("rain", "snow"))
    caches = [str(tmp_path / name) for name in ("one", "two")]
    chain = slots(data={"cache": "${oc.env:CACHE}"})
    said = refused(nodes(chain, *apart(models, rows, CACHE=caches)), pipe)
    assert "differ from rank 0's" in said
